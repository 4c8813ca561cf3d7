"""Rewards from lengths, log-probabilities, views and scores (golden arrays: test_surrogate_golden)."""

from __future__ import annotations

import math

import pytest
import torch

from genrl.objectives import token_regularisers as rs


def test_too_long_is_punished_softly() -> None:
    penalty = rs.overlong_penalty(torch.tensor([10, 16, 18, 20, 30]), maximum=20, buffer=4)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="between 1 and the maximum"):
        rs.overlong_penalty(torch.tensor([1]), maximum=20, buffer=0)


def test_confidence_is_of_the_answers_tokens_and_capped() -> None:
    reference = torch.tensor([[-9.0, math.log(0.5)], [-9.0, -0.001], [torch.nan, torch.nan]])
    answer = torch.tensor([[0, 1], [0, 1], [0, 0]])
    assert torch.allclose(rs.answer_confidence(reference, answer), torch.tensor([0.5, 0.95, 0.95]), atol=1e-5)


def test_the_bonus_goes_to_right_answers_that_follow_from_the_reasoning() -> None:
    accuracy = torch.tensor([1.0, 1.0, 0.0, 0.05, 0.05])
    confidence = torch.tensor([0.9, 0.3, 0.95, 0.9, 0.9])
    group = torch.tensor([0, 0, 0, 1, 1])
    assert rs.consistency_bonus(accuracy, confidence, group).tolist() == [0.5, 0.0, 0.0, 0.0, 0.0]
    assert rs.consistency_bonus(accuracy, confidence, group, margin=0.4)[1] == 0.5


def test_the_kl_in_the_reward_costs_where_the_policy_is_surer_than_the_reference() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, torch.nan]], requires_grad=True)
    reference, mask = torch.tensor([[-3.0, -1.0, torch.nan]]), torch.tensor([[1, 1, 0]])
    rewards = rs.with_kl(torch.tensor([[0.0, 1.0, torch.nan]]), log_prob, reference, mask, beta=0.1)
    assert torch.allclose(rewards, torch.tensor([[-0.2, 1.1, 0.0]])) and not rewards.requires_grad


def test_views() -> None:
    scores = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    assert rs.over_views(scores, "max").tolist() == [3.0, 2.0]
    assert rs.over_views(scores, "sum").tolist() == [4.0, 4.0]
    assert rs.over_views(scores, "mean").tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="'max', 'sum' or 'mean'"):
        rs.over_views(scores, "min")  # type: ignore[arg-type]
