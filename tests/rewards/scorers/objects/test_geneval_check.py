"""GenEval's rules against golden cases, and what must hold for any picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genrl_rewards.scorers.objects.geneval_check import Box, check, relations


@pytest.fixture
def golden_geneval(golden_json: Callable[[str], Any]) -> dict[str, Any]:
    return golden_json("rewards_geneval")


def test_verdicts_equal_the_golden_ones(golden_geneval: dict[str, Any]) -> None:
    for case in golden_geneval["cases"]:
        found = {name: [Box(*row) for row in rows] for name, rows in case["detections"].items()}
        colours = {tuple(box): colour for box, colour in case["colors"]}
        verdict = check(case["metadata"], found, lambda _, boxes, seen=colours: [seen[box[:4]] for box in boxes])
        assert verdict.relaxed == float(case["relaxed_correct"]), case
        assert verdict.strict == float(case["strict_correct"]), case
        assert verdict.partial == pytest.approx(case["soft_recommended_clipped"], abs=1e-12), case


def test_relations_equal_the_golden_ones(golden_geneval: dict[str, Any]) -> None:
    for case in golden_geneval["relations"]:
        assert relations(Box(*case["a"]), Box(*case["b"])) == set(case["a_relative_to_b"]), case


boxes = st.builds(
    lambda x, y, w, h: Box(x, y, x + w, y + h),
    *(st.floats(0, 500, width=32) for _ in range(2)),
    *(st.floats(1, 200, width=32) for _ in range(2)),
)


@given(boxes, boxes)
def test_relations_turn_round_with_the_boxes(a: Box, b: Box) -> None:
    turned = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    assert {turned[name] for name in relations(a, b)} == relations(b, a)
    assert relations(a, a) == set()


@given(st.lists(boxes, max_size=20), st.integers(1, 4))
def test_any_picture_is_scored_within_bounds(cats: list[Box], count: int) -> None:
    asked = {"include": [{"class": "cat", "count": count, "color": "red", "position": ["above", 0]}]}
    asked["include"].insert(0, {"class": "dog", "count": 1})
    verdict = check(asked, {"cat": cats, "dog": [Box(10, 400, 30, 420)]}, lambda name, seen: ["red"] * len(seen))
    assert 0 <= verdict.partial <= 1 and 0 <= verdict.count <= 1
    assert verdict.strict <= verdict.relaxed or len(cats) == count
    if len(cats) != count:
        assert verdict.strict == 0 and verdict.colour == 0


def test_a_crowd_is_no_worse_than_nothing() -> None:
    """The peers' count term is 1 - 15 / 1 = -14 for sixteen cats where one was asked."""
    asked = {"include": [{"class": "cat", "count": 1}]}
    verdict = check(asked, {"cat": [Box(i, 0, i + 1, 1) for i in range(16)]}, lambda name, seen: [])
    assert (verdict.partial, verdict.strict, verdict.relaxed) == (0.0, 0.0, 1.0)
    assert math.isnan(verdict.colour) and math.isnan(verdict.position)


def test_what_is_excluded_must_not_be_there() -> None:
    asked = {"include": [{"class": "cat", "count": 2}], "exclude": [{"class": "cat", "count": 3}]}
    for number, relaxed in ((1, 0), (2, 1), (3, 0)):
        seen = {"cat": [Box(9 * i, 0, 9 * i + 5, 5) for i in range(number)]}
        assert check(asked, seen, lambda name, boxes: []).relaxed == relaxed
