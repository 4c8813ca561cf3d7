"""Losses of whole groups: closed forms and gradients (golden arrays: test_surrogate_golden)."""

from __future__ import annotations

import pytest
import torch

from genrl.objectives.tokens import group_losses


def test_the_first_update_has_a_finite_gradient_of_one_over_epsilon() -> None:
    score = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([-1.0, 0.0, 1.0])
    loss = group_losses.regression_loss(score, advantage, torch.zeros(3).long(), eps=1e-3).sum()
    (gradient,) = torch.autograd.grad(loss, score)
    assert torch.allclose(gradient, -2 * advantage.double() / 1e-3)
    alone = group_losses.regression_loss(score[:1], torch.tensor([0.5]), torch.zeros(1).long())
    assert alone.tolist() == [0.25]


def test_temperatures_are_positive() -> None:
    with pytest.raises(ValueError, match="tau must be positive, got 0"):
        group_losses.classification_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2).long(), tau=0.0)
