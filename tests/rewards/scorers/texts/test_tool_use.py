"""Rewards of tool use, by hand."""

from __future__ import annotations

import pytest

from genrl_rewards.scorers.texts.tool_use import (
    conan,
    conan_action,
    conan_clue,
    para_grpo,
    tool_format,
    tool_success,
    vrag_rl,
)

LOOKED = (
    "<think> i look closer </think> <bbox>[0,0,16,16]</bbox>\n<think> it is rows </think> <answer> rows </answer>\n"
)


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        # .2 thought, .3 + .2 answer, (.4 closed + .3 flow) / 2, .3 thought before the call, .1 balance: above 1
        (LOOKED, 1.0),
        ("<think> i look closer </think> <answer> rows </answer>", 0.2 + 0.5 + 0.35 + 0.1),
        ("<answer> rows </answer>", 0.5 + 0.1),
        ("<answer> </answer>", 0.1),  # an empty answer has no tags to be paid for
        ("<think> i look closer <answer> rows", 0.2 + 0.3 - 0.15),  # the thought is never closed
        ("<think> hm </think> <bbox>[0,0,16,16]</bbox>", 0.2 + 0.3 + 0.1),  # one word is no thought
        ("<bbox>[0,0,16,16]</bbox> <think> i look closer </think>", 0.2 + 0.2 + 0.1),  # thought after the call
        ("<think> i look closer </think> <bbox>here</bbox>", 0.2 + 0.2 + 0.1),  # no call that can be read
        ("", 0.0),
    ],
)
def test_the_form_is_paid_for_part_by_part(text: str, worth: float) -> None:
    assert tool_format(text) == pytest.approx(min(1.0, worth))
    other = "<think> i look closer </think> <clip>[1,4]</clip>"  # a tool with a tag and numbers of its own
    assert tool_format(other, call="clip", numbers=2) == pytest.approx(0.2 + 0.2 + 0.3 + 0.1)
    assert tool_format(other + " <clip>", call="clip", numbers=2) == pytest.approx(0.2 + 0.2 + 0.3)


def test_a_tool_pays_when_it_is_read_executed_and_of_use() -> None:
    assert tool_success(parsed=False, executed=False, accurate=True) == 0.0
    assert tool_success(parsed=True, executed=False, accurate=False) == pytest.approx(0.1)
    assert tool_success(parsed=True, executed=True, accurate=False) == pytest.approx(0.3)
    assert tool_success(parsed=True, executed=True, accurate=True) == pytest.approx(0.8)
    assert para_grpo(1.0, 0.9, 0.8) == pytest.approx(2.7)


def test_vrag_rl_pays_for_what_is_said_only_where_the_form_is_kept() -> None:
    assert vrag_rl(1.0, 1.0, 0.5) == pytest.approx(0.7 + 0.1 + 0.1)
    assert vrag_rl(1.0, 0.0, 1.0) == 0.0


def test_conan_pays_for_frames_that_are_scored_rightly() -> None:
    assert conan_clue([{0: 5, 2: 1, 4: 4, 6: 1}], {2, 4}) == pytest.approx(1 / 3)  # {0, 4} and {2, 4}
    assert conan_clue([{0: 3, 2: 1, 4: 2}], {0}) == 1.0  # none of 4: those of 3
    assert conan_clue([{0: 3, 2: 4}], {0}) == 0.0  # one of 4: the 3 does not count
    assert conan_clue([{0: 1, 2: 2}], {5}) == 1.0 and conan_clue([{0: 5}], {5}) == 0.0  # nothing relevant is shown
    assert conan_clue([{0: 5}, {1: 1, 2: 5}], {0, 1, 2}) == pytest.approx((1 + 0.5) / 2)
    assert conan_clue([], {0}) == 0.0


def test_conan_pays_for_requests_that_bring_what_is_new() -> None:
    assert conan_action([({2, 3}, {3, 4, 5})], 0.2) == pytest.approx(1 / 3)
    assert conan_action([({2, 3}, {3, 4}), ({4}, {4})], 0.2) == pytest.approx((0.5 + 1) / 2)
    assert conan_action([({1}, set())], 0.2) == 0.0
    assert conan_action([], 0.2) == 0.2  # nothing was requested
    assert conan_action([(range(4), range(20))], 0.2) == 0.5  # at most eight are to be found
    assert conan_action([(range(12), range(20))], 0.2) == 1.0


def test_conan_pays_for_evidence_where_the_answer_is_right() -> None:
    assert conan(1.0, 0.5, 0.25, formed=True) == pytest.approx(1 + 0.5 + 0.25 + 0.5)
    assert conan(0.4, 0.5, 0.25, formed=False) == pytest.approx(0.4 + 0.75)
    assert conan(0.0, 1.0, 1.0, formed=True) == 0.5
