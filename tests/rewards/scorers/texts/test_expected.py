"""Expected answers: what is read as what, what is nothing, and what is refused."""

import json
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrl_rewards.rows import survey
from genrl_rewards.scorers.texts import expected as e
from genrl_rewards.scorers.texts import verifiable as v
from genrl_rewards.scorers.texts.completions import load_text

COMPARING: tuple[Callable[..., Any], ...] = (v.exact, v.numeric, v.relaxed, v.anls, v.choice, v.words, v.rouge)
COMPARING += (v.iou, v.point_in_box, v.ordering, v.indices, v.rating)


def tagged(*texts: str) -> list[str]:
    return [f"<answer> {text} </answer>" for text in texts]


@pytest.mark.parametrize("rule", COMPARING, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("nothing", [None, math.nan, "", "  ", [], [None], np.array([]), np.float32("nan")], ids=repr)
def test_nothing_expected_is_no_score(rule: Callable[..., Any], nothing: Any) -> None:
    assert rule(tagged("None"), [nothing]) == [None]
    column = "box" if rule in (v.iou, v.point_in_box) else "answer"
    assert rule.read_row(**{column: nothing}) == e.NOTHING  # type: ignore[attr-defined]


def test_numbers_in_a_column_are_the_texts_that_they_are_written_as() -> None:
    assert v.exact(tagged("3", "3.0", "4", "-2"), [3.0, 3.0, 3.0, np.float64(-2)]) == [1.0, 1.0, 0.0, 1.0]
    assert v.exact(tagged("3", "3", "½"), [["3"], np.array([3]), "1/2"]) == [1.0, 1.0, 1.0]
    assert v.relaxed(tagged("0", "0.0"), [0.0, 0]) == [1.0, 0.0]
    single = float(np.float32(0.1))  # of a column in single precision: 0.10000000149011612
    assert v.exact(tagged("0.1", "0.10000000149011612"), [single, single]) == [1.0, 1.0]
    assert v.words(tagged("3"), [3]) == v.rouge(tagged("3"), [3.0]) == v.anls(tagged("3"), [3]) == [1.0]
    assert v.anls(tagged("14"), [[14, "fourteen"]]) == [1.0]
    with pytest.raises(ValueError, match="choice: row 0: .* 2, which names no letter"):
        v.choice(tagged("B"), [2])


def test_what_cannot_be_read_is_refused_by_rule_and_row() -> None:
    for rule, value, words in (
        (v.exact, ["a", "b"], "2 of them; write one"),
        (v.exact, {"a": 1}, "a dict; write a text or a number"),
        (v.numeric, "3 or 4", "not one number"),
        (v.numeric, "±3", "not one number"),
        (v.numeric, "1,5", "not one number"),
        (v.numeric, True, "not one number"),
        (v.ordering, [1.5, 2], "write whole numbers"),
        (v.indices, "none", "write whole numbers"),
        (v.ordering, "3, 1, two", "write whole numbers"),
        (v.iou, "[[10, 20, 30, 40], [50, 60, 70, 80]]", "a box has"),
        (v.iou, "left=10, top=20, w=20, h=20", "a box has"),
        (v.iou, {"x": 1, "y": 2, "width": 3, "height": 4}, "a box has"),
        (v.iou, [100, 100, 20, 30], "second corner is before its first"),
        (v.iou, "somewhere", "a box has"),
        (v.iou, [1, 2, 3, None], "a box has"),
        (v.point_in_box, [1, 2], "a box has 4"),
    ):
        with pytest.raises(ValueError, match=f"{rule.__name__}: row 0: .*{words}"):
            rule(tagged("1"), [value])


NUMBERS = {
    **{"−5": -5, "–5": -5, "- 5": -5, "-$5": -5, "minus 5": -5, "x = − 5": -5, "covid-19": 19, "５": 5, "٣": 3},
    **{"2½": 2.5, "3 × 10⁸": 3e8, "10^3": 1000, "5 cm²": 5, "1’234": 1234, "1\u202f234": 1234, "1.5 million": 1.5e6},
    **{"10–20": None, "± 5": None, "result - 5": None, "5 - 3": None, "1,5": None},
    **{"1.5k": 1500, "£1.2bn": 1.2e9, "2M": None, "300K": None, "3 dozen": None, "5!": None, "5 or more": None},
    **{"at least 5": None, "< 5": None, "≥5": None, "> 5": None, "not 5": None, "-> 5": 5, "</b> 5": 5, "So 5!": 5},
}


def test_signs_digits_and_scales_of_a_number() -> None:
    assert {text: e.number_in(text) for text in NUMBERS} == NUMBERS
    assert v.numeric(tagged("−5", "5"), ["-5", "−5"]) == v.relaxed(tagged("−5", "5"), ["-5", "−5"]) == [1.0, 0.0]


def test_small_numbers_are_compared_by_significant_digits() -> None:
    written, truth = ("0.004", "0.001", "0.33", "0.004", "1e-12", "0.05"), (0.001, 0.001, 1 / 3, 0.0, 2e-12, 0.0504)
    assert v.numeric(tagged(*written), [*truth]) == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]


BOXES = {
    "list": str,
    "bbox_2d": lambda b: json.dumps({"bbox_2d": b, "label": "cat 2"}),
    "fenced": lambda b: "```json\n" + json.dumps([{"label": "7", "bbox_2d": b}]) + "\n```",
    "corners": lambda b: f"({b[0]}, {b[1]}), ({b[2]}, {b[3]})",
    "nested": lambda b: f"[[{b[0]}, {b[1]}], [{b[2]}, {b[3]}]]",
    "named": lambda b: json.dumps(dict(zip(("x1", "y1", "x2", "y2"), b, strict=True))),
    "equals": lambda b: "x1={}, y1={}, x2={}, y2={}".format(*b),
    "powers": lambda b: "[" + ", ".join(f"{place / 100}e2" for place in b) + "]",
    "after text": lambda b: f"Box 1 of the 2 cats is {b}",
}


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([*BOXES]), st.lists(st.integers(-20, 20), min_size=2, max_size=2), st.booleans())
def test_a_box_is_read_in_every_form(form: str, corner: list[int], minus: bool) -> None:
    box = [*corner, corner[0] + 7, corner[1] + 9]
    text = BOXES[form](box)
    text = text.replace("-", "−") if minus and "json" not in form else text
    assert v.iou(tagged(text), [box]) == [1.0] == v.iou(tagged(str(box)), [text])


def test_points_and_boxes_that_are_none() -> None:
    points = ('{"point_2d": [15, 25]}', "(15, 25)", "x=15, y=25", "15 25", '{"x": 15, "y": 25}', "15", "[15, 25, 3]")
    assert v.point_in_box(tagged(*points), [[10, 20, 30, 40]] * 7) == [1.0] * 5 + [0.0] * 2
    assert v.iou(tagged('{"x": 10, "y": 20, "width": 30, "height": 40}'), [[10, 20, 30, 40]]) == [0.0]
    assert v.iou(tagged("[5, 6]"), [[0, 0, 9, 9]]) == [0.0]


def test_letters_and_percents_as_models_write_them() -> None:
    written = ("**B**", r"\boxed{B}", "[B]", '"b"', "It's B")
    assert v.choice(tagged(*written), ["B"] * 5) == [1.0] * 4 + [0.0]
    assert v.choice(tagged("A, C"), ['["A", "C"]']) == [1.0]
    assert v.relaxed(tagged("50 percent", "50%.", "0.5", "50"), ["50%"] * 4) == [1.0, 1.0, 1.0, 0.0]


def test_all_rows_are_read_before_a_run_and_those_that_cannot_be_are_named(caplog: pytest.LogCaptureFixture) -> None:
    answers = ["5", "5x+3", None, "the red one", 3.0, "1/2"] + ["7"] * 6
    rows = [(f"data.jsonl:{k}", {"answer": answer}) for k, answer in enumerate(answers, 1)]
    result = survey("right", load_text("math", {"tag": ""}), rows)
    assert result is not None and result.kinds == {"number": 8, "formula": 2, "nothing": 1} and result.rows == 12
    logger = logging.getLogger("rows")
    result.tell(logger)
    assert "1 rows have no score: data.jsonl:3" in caplog.text and "data.jsonl:4: the expected answer" in caplog.text
    with pytest.raises(ValueError, match="cannot be read: data.jsonl:4"):
        result.tell(logger, limit=0.01)
    assert survey("mine", lambda completions: [1.0], rows) is None
