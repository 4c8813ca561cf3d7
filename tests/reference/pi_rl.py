"""RLinf, the code of pi_RL (arXiv 2510.25889): how it bootstraps cut chunks and averages over episodes."""

from __future__ import annotations

import torch
from torch import Tensor


def fold_bootstrap(
    rewards: Tensor, terminated: Tensor, truncated: Tensor, final_values: Tensor, *, gamma: float, always: bool
) -> Tensor:
    """`r_last += gamma V(final observation)` for chunks that cut an episode: rewards [B, C], flags and values [B].

    How pi_RL bootstraps under auto-reset: its GAE then treats every done as an end. always: after success, too, which
    keeps finishing from being worth less than going on. Returns [B, C] float64.
    """
    ended = truncated.bool() | terminated.bool() if always else truncated.bool()
    folded = rewards.double().clone()
    folded[..., -1] += torch.where(ended, gamma * final_values.detach().double(), 0.0)
    return folded


def episode_weighted_mean(elements: Tensor, valid: Tensor, length: Tensor, longest: int) -> Tensor:
    """Mean over *all* slots of `x valid longest / length`: every episode weighs the same, whatever its length. [].

    length: number of valid steps of the episode a slot belongs to; longest: the time limit (pi_RL, with a loss mask).
    elements [B, ...]; valid and length broadcastable to it.
    """
    weight = torch.where(valid.bool(), longest / length.to(elements.dtype).clamp(min=1.0), 0.0)
    return (torch.where(valid.bool(), elements, 0.0) * weight).mean()


def masked_mean(elements: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid elements, []: elements and valid of one shape, or broadcastable."""
    return elements[valid.bool().expand(elements.shape)].mean()
