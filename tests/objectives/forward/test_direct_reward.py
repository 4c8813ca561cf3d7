"""Losses of direct reward back-propagation."""

from __future__ import annotations

import pytest
import torch

from genrl.diffusion.forward import direct as direct_reward


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
