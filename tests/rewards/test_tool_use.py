"""Rewards of tool use, by hand."""

from __future__ import annotations

import math

import pytest

from rewards.tool_use import ndcg, para_grpo, tool_format, tool_success, vrag_rl

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
        ("", 0.0),
    ],
)
def test_the_form_is_paid_for_part_by_part(text: str, worth: float) -> None:
    assert tool_format(text) == pytest.approx(min(1.0, worth))


def test_a_tool_pays_when_it_is_read_executed_and_of_use() -> None:
    assert tool_success(parsed=False, executed=False, accurate=True) == 0.0
    assert tool_success(parsed=True, executed=False, accurate=False) == pytest.approx(0.1)
    assert tool_success(parsed=True, executed=True, accurate=False) == pytest.approx(0.3)
    assert tool_success(parsed=True, executed=True, accurate=True) == pytest.approx(0.8)
    assert para_grpo(1.0, 0.9, 0.8) == pytest.approx(2.7)


def test_what_is_fetched_late_is_worth_less() -> None:
    assert ndcg([1.0], 1) == 1.0
    assert ndcg([0.0, 1.0], 1) == pytest.approx(1 / math.log2(3))
    assert ndcg([1.0, 0.0, 1.0], 2) == pytest.approx((1 + 0.5) / (1 + 1 / math.log2(3)))
    assert ndcg([], 1) == 0.0 == ndcg([0.0], 0)
    assert ndcg([1.0, 1.0], 1) == 1.0  # the same piece twice


def test_vrag_rl_pays_for_what_is_said_only_where_the_form_is_kept() -> None:
    assert vrag_rl(1.0, 1.0, 0.5) == pytest.approx(0.7 + 0.1 + 0.1)
    assert vrag_rl(1.0, 0.0, 1.0) == 0.0
