"""What every reward with gradients has to do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import rewards


def assert_gradients_agree(
    reward: rewards.Reward, images: torch.Tensor, prompts: Sequence[str], *, within: float
) -> None:
    """Gradients reach the picture, and scores with and without them agree but for 8-bit rounding."""
    plain = rewards.score(reward, images=images, prompts=prompts).values
    leaf = images.clone().requires_grad_()
    scores = rewards.score_with_gradients(reward, images=leaf, prompts=prompts)
    scores.sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    assert scores.tolist() == pytest.approx(plain, abs=within)
