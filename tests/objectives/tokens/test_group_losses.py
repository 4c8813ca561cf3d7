"""Losses of whole groups: closed forms and gradients (golden arrays: test_surrogate_golden)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.objectives.tokens import group_losses

GROUP = torch.tensor([4, 4, 4, 9, 9, 9])


def test_the_first_update_has_a_finite_gradient_of_one_over_epsilon() -> None:
    score = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([-1.0, 0.0, 1.0])
    loss = group_losses.regression_loss(score, advantage, torch.zeros(3).long(), eps=1e-3).sum()
    (gradient,) = torch.autograd.grad(loss, score)
    assert torch.allclose(gradient, -2 * advantage.double() / 1e-3)
    alone = group_losses.regression_loss(score[:1], torch.tensor([0.5]), torch.zeros(1).long())
    assert alone.tolist() == [0.25]


@given(st.integers(0, 99))
def test_distributions_match_where_scores_are_the_rewards(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(6, generator=generator, dtype=torch.float64)
    score = (rewards / 0.5 + 7.0).requires_grad_()
    loss = group_losses.distribution_matching_loss(score, rewards, GROUP, tau=0.5)
    (gradient,) = torch.autograd.grad(loss.sum(), score)
    assert torch.allclose(loss, torch.zeros(2).double(), atol=1e-12)
    assert torch.allclose(gradient, torch.zeros(6).double(), atol=1e-12)
    other = group_losses.distribution_matching_loss(score + rewards.flip(0), rewards, GROUP, tau=0.5)
    assert bool((other >= 0).all())


def test_a_row_without_score_is_left_out_of_the_distribution() -> None:
    score = torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64, requires_grad=True)
    loss = group_losses.distribution_matching_loss(
        score, torch.tensor([0.0, 1.0, torch.nan]), torch.zeros(3).long(), tau=1.0
    )
    assert torch.allclose(loss, torch.zeros(1).double(), atol=1e-12)


def test_temperatures_are_positive() -> None:
    for loss in (group_losses.classification_loss, group_losses.distribution_matching_loss):
        with pytest.raises(ValueError, match="tau must be positive, got 0"):
            loss(torch.zeros(2), torch.zeros(2), torch.zeros(2).long(), tau=0.0)
