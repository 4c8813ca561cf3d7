"""Losses of direct reward back-propagation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.mdp import noise
from genrl.objectives.forward import direct_reward


@given(st.integers(0, 99), st.floats(0.0, 1.0))
def test_the_right_velocity_predicts_the_data(seed: int, sigma: float) -> None:
    clean, source = (noise.keyed_noise((3, 2, 4), seed, name).double() for name in ("clean", "source"))
    levels = torch.tensor([sigma, 0.5, 1.0], dtype=torch.float64)
    column = levels.view(-1, 1, 1)
    state = (1 - column) * clean + column * source
    assert torch.allclose(direct_reward.predicted_clean(state, source - clean, levels), clean, atol=1e-12)


def test_a_reward_is_raised_up_to_its_margin() -> None:
    rewards = torch.tensor([-1.0, 1.0, 3.0], requires_grad=True)
    direct_reward.reward_loss(rewards).sum().backward()
    assert rewards.grad is not None and rewards.grad.tolist() == [-1.0, -1.0, -1.0]
    rewards.grad = None
    loss = direct_reward.reward_loss(rewards, margin=2.0)
    loss.sum().backward()
    assert loss.tolist() == [3.0, 1.0, 0.0] and rewards.grad.tolist() == [-1.0, -1.0, 0.0]


def test_a_reward_without_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="differentiable reward"):
        direct_reward.reward_loss(torch.ones(2))
