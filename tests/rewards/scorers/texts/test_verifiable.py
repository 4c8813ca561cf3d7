"""Rules for written answers, and how text rewards are called."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genrl_rewards.scorers.texts import verifiable as v
from genrl_rewards.scorers.texts.completions import score_completions
from genrl_rewards.scorers.texts.expected import number_in


def tagged(*texts: str) -> list[str]:
    return [f"<think> because </think> <answer> {text} </answer>" for text in texts]


def test_the_answer_is_the_last_complete_tag_and_one_number() -> None:
    assert v.answer_in("<answer>1</answer> no, <answer> 2\n</answer> end") == "2"
    assert v.answer_in("<answer>1</answer> <answer>2") == "1"
    assert v.answer_in("<answer> <answer> 3 </answer>") == "3"
    assert v.answer_in("no tag") is None and v.answer_in(" all ", tag="") == "all"
    ones = {"3": 3.0, "-1,234.5 kg": -1234.5, "about 3/4": 0.75, "1e-3": 0.001, "$ .5": 0.5, "x = 7.": 7.0}
    none = ("3 or 4", "1/0", "none", "2024-05-06")
    assert {text: number_in(text) for text in (*ones, *none)} == ones | dict.fromkeys(none)


@given(st.text(max_size=60))
def test_no_text_breaks_the_rules(text: str) -> None:
    for rows in ([text], tagged(text)):
        for score in (
            *v.exact(rows, ["x"]),
            *v.numeric(rows, [1.0]),
            *v.numeric(rows, [1.0], relative=True),
            *v.choice(rows, ["A, B"], partial=True),
            *v.iou(rows, [[0, 0, 1, 1]]),
            *v.point_in_box(rows, [[0, 0, 1, 1]]),
            *v.ordering(rows, [[1, 2, 3, 4]], columns=2),
            *v.words(rows, ["a b"]),
            *v.tag_format(rows),
            *v.majority(rows, [0]),
        ):
            assert score is not None and 0 <= score <= 1


def test_texts_numbers_and_choices() -> None:
    assert v.exact([*tagged("Red  Cube"), "red cube"], ["red cube"] * 2) == [1.0, 0.0]
    assert v.exact(tagged("Red"), ["red"], ignore_case=False) == [0.0]
    assert v.exact(tagged("3"), [3]) == [1.0]  # a column of numbers
    assert v.exact(tagged("x"), [""]) == [None]
    assert v.words(tagged("the red cube", "", "a b c d e f"), ["the red ball"] * 3) == pytest.approx([2 / 3, 0.0, 0.0])
    assert v.numeric(tagged("3.14", "3.15", "two"), [3.1416] * 3) == [1.0, 0.0, 0.0]
    assert v.numeric(tagged("3.1416", "3.14"), [3.1416] * 2, decimals=None) == [1.0, 0.0]
    assert v.numeric(tagged("90", "250"), [100.0] * 2, relative=True) == pytest.approx([0.9, 0.0])
    with pytest.raises(ValueError, match="row 1: the expected answer is 'many', which is not one number"):
        v.numeric(tagged("3", "3"), ["3", "many"])
    completions = tagged("B", "(b)", "B: a cube", "A dog and a B", "A and B", "the second")
    assert v.choice(completions, ["B"] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert v.choice(tagged("A", "A, C", "A, B", "D", ""), ["A, C"] * 5, partial=True) == [0.5, 1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="names no letter"):
        v.choice(tagged("A"), ["1"])


def test_overlap_by_hand() -> None:
    completions = tagged("[0, 0, 10, 10]", "0 0 10", "[10, 10, 0, 0]", "[5, 0, 15, 10]")
    assert v.iou(completions, [[0, 0, 10, 10]] * 4) == pytest.approx([1.0, 0.0, 0.0, 1 / 3])
    assert v.iou(completions[3:], ["[0, 0, 10, 10]"], threshold=0.3) == [1.0]
    assert v.iou(tagged("from 10-20 s"), [[15, 25]]) == pytest.approx([1 / 3])
    assert v.iou(tagged("1"), [""]) == [None]
    assert v.point_in_box(tagged("5, 5", "11, 5", "5"), [[0, 0, 10, 10]] * 3) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="a box has 4 numbers"):
        v.iou(tagged("1"), [[1, 2, 3]])
    one, other = [0, 0, 10, 10], [5, 2, 15, 8]
    assert v.iou_of(one, other) == v.iou_of(other, one) == pytest.approx(30 / 130) and v.iou_of(other, other) == 1.0


def test_a_jigsaw_by_positions_and_by_neighbours() -> None:
    truth = [[1, 2, 3, 4]]
    assert v.ordering(tagged("1, 2, 4, 3"), truth) == [0.5]
    assert v.ordering(tagged("1, 2, 2, 3"), truth) == [0.0]
    assert v.ordering(tagged("1, 2, 3, " + "9" * 400), truth) == [0.0]
    # of 1-2, 3-4, 1/3, 2/4 only 1-2 is left
    assert v.ordering(tagged("1, 2, 4, 3"), ["1, 2, 3, 4"], columns=2) == [0.25]
    # a shifted puzzle has no piece in place and most neighbours right
    assert v.ordering(tagged("2, 3, 4, 1"), truth, columns=4) == pytest.approx([2 / 3])


def test_the_format() -> None:
    kept = ["<think> a </think><answer> b </answer>", "\n<think>a</think>\n <answer>b</answer>\n"]
    kept.append("a</think><answer>b</answer>")  # the template has opened the tag
    broken = [
        "<think>a</think> so <answer>b</answer>",
        "<think></think><answer>b</answer>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a<answer>b</answer></think>",
        "<answer>b</answer><think>a</think>",
        "<think>a</think><answer>b",
        "a <answer>b</answer>",
    ]
    assert v.tag_format([*kept, *broken]) == [1.0] * 3 + [0.0] * 7


def test_the_majority_and_the_diversity_of_each_group() -> None:
    completions = [*tagged("3", "4", "3 "), "no answer", *tagged("x", "Y")]
    assert v.majority(completions, [0, 0, 0, 0, 1, 1]) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    completions = [*tagged("a", "b", "c", "A", "x", "x"), "none", *tagged("y")]
    scores = v.diversity(completions, [0, 0, 0, 1, 2, 2, 2, 3])
    assert scores == [pytest.approx(1.0)] * 3 + [None, 0.0, 0.0, None, None]
    three = v.diversity(tagged("a", "a", "a", "b"), [0] * 4)[0]
    assert three == pytest.approx((0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(4))


# --- calling them
def test_functions_of_trl_run_as_they_are_their_defaults_get_their_column_and_an_option_of_ours_stays_one() -> None:
    def accuracy_reward(completions, answer, **kwargs):
        assert kwargs.keys() == {"prompts", "tag"}
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if a == b else None for a, b in zip(contents, answer, strict=True)]

    def length_reward(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def accuracy(completions, answer=None, **kwargs):
        return [float(one[0]["content"] == wanted) for one, wanted in zip(completions, answer, strict=True)]

    def plain(completions, answer=()):
        return [float(one == wanted) for one, wanted in zip(completions, answer, strict=True)]

    async def slow(prompts, completions, answer=None, **kwargs):
        return [float(one == wanted) for one, wanted in zip(completions, answer, strict=True)]

    row = {"prompts": ["p", "p"], "completions": ["x", "y"], "columns": {"answer": ["x", "x"], "tag": ["counting"] * 2}}
    scores = score_completions(accuracy_reward, **row, conversational=True)
    assert scores.values[0] == 1.0 and math.isnan(scores.values[1])
    assert score_completions(length_reward, **row, completion_ids=[[1, 2], [3]]).values == [2, 1]
    assert score_completions(accuracy, **row, conversational=True).values == [1.0, 0.0]
    assert score_completions(plain, **row).values == score_completions(slow, **row).values == [1.0, 0.0]
    tagged_row = row | {"completions": tagged("x", "y")}
    assert score_completions(v.exact, **tagged_row).values == [1.0, 0.0]


def test_what_is_wrong_is_named() -> None:
    def needy(completions, anwser): ...
    def broken(completions):
        raise KeyError("oops")

    row = {"prompts": ["p", "p"], "completions": ["x", "y"], "columns": {"answer": ["x", "y"]}}
    for reward, changes, words in (
        (needy, {}, r"asks for 'anwser', but the data has answer, .* Did you mean 'answer'\?"),
        (lambda completions: [1.0], {}, "returned 1 numbers for 2 samples"),
        (v.exact, {"columns": {"answer": ["x"]}}, "unequal numbers of rows"),
    ):
        with pytest.raises(ValueError, match=words):
            score_completions(reward, **row | changes)
    failed = score_completions(broken, **row)
    assert failed.failed == 2 and "oops" in failed.failures[0].error


def test_rouge_and_retrieved_pages_by_hand() -> None:
    completions = tagged("the red cube", "Red, the cube!", "blue", "cube")
    scores = v.rouge(completions, ["the red cube"] * 3 + ["cube"])
    # 1: 3 of 3 words; 2: none of 2 pairs; L: `the cube` or `red cube`, 2 of 3
    assert scores == pytest.approx([1.0, (1 + 0 + 2 / 3) / 3, 0.0, 1.0])
    assert v.rouge(completions[:1], ["?"]) == [None]
    assert v.ndcg_of(["a", "x", "b"], ["a", "b"]) == pytest.approx((1 + 1 / 2) / (1 + 1 / math.log2(3)))
    assert v.ndcg_of(["b", "a"], ["a", "b"]) == 1.0 and v.ndcg_of(["a", "a", "b"], ["a", "b"]) == 1.0
    assert v.ndcg_of(["x"], ["a"]) == 0.0 == v.ndcg_of(["x"], [])


def test_key_frames_by_overlap_and_ratings_by_distance_as_in_the_golden_arrays(golden: Any) -> None:
    texts = ["<answer> 2 3 </answer>", "<answer> 3, 4 </answer>", "<answer> none </answer>", "2 3"]
    assert v.indices(texts, ["2 3"] * 4) == [1.0, 1 / 3, 0.0, 0.0]
    assert v.indices(["<answer> 1 </answer>"] * 2, ["", [1, 2]]) == [None, 0.5]
    texts = ["<answer> 3.5 </answer>", "<answer> 9 </answer>", "<answer> good </answer>"]
    assert v.rating(texts, [3.2, 5, 5]) == pytest.approx([math.exp(-1), 1.0, 0.0])
    assert v.rating(texts[:1], [""]) == [None]
    with pytest.raises(ValueError, match="row 0: the expected answer is 'bad', which is not one number"):
        v.rating(texts[:1], ["bad"])
    arrays = golden("vlm_q_hawkeye")
    rated = [name.removesuffix("_scores") for name in arrays if name.endswith("_scores")]
    assert rated
    for case in rated:
        scores, truth = arrays[f"{case}_scores"].flatten(), arrays[f"{case}_gt"]
        texts = [f"<answer> {value!r} </answer>" for value in scores.tolist()]  # nan: no number
        want = arrays[f"{case}_out_reward"].flatten().tolist()
        assert v.rating(texts, np.repeat(truth, len(scores) // len(truth)).tolist()) == pytest.approx(want, abs=1e-9)
