"""What most tests of rewards do: score and see no failure, load what is refused, and follow gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import genrl_rewards


def scored(reward: genrl_rewards.Reward, **given: Any) -> genrl_rewards.Scores:
    """Its scores; a failure is shown with its traceback."""
    scores = genrl_rewards.score(reward, **given)
    assert not scores.failures, scores.failures[0].traceback
    return scores


def refused(words: str, name: str, args: Mapping[str, Any] | None = None, **more: Any) -> None:
    """Loading this reward fails with this message."""
    with pytest.raises(ValueError, match=words):
        genrl_rewards.load(name, dict(args or {}), **more)


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
