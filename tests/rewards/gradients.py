"""What every reward with gradients has to do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import genrl_rewards


def assert_gradients_agree(
    reward: genrl_rewards.Reward, images: torch.Tensor, prompts: Sequence[str], *, within: float
) -> None:
    """Gradients reach the picture, and scores with and without them agree but for 8-bit rounding."""
    plain = genrl_rewards.score(reward, images=images, prompts=prompts).values
    leaf = images.clone().requires_grad_()
    scores = genrl_rewards.score_with_gradients(reward, images=leaf, prompts=prompts)
    scores.sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    assert scores.tolist() == pytest.approx(plain, abs=within)
