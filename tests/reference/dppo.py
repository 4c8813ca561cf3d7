"""DPPO (arXiv 2409.00588): the running scale of its rewards and the quantile clip of its advantages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ReturnScale(NamedTuple):
    """Running variance of discounted returns: mean, variance, weight (float64 []), and the open returns [B]."""

    mean: Tensor
    variance: Tensor
    weight: Tensor
    open_returns: Tensor


def new_return_scale(batch: int) -> ReturnScale:
    """Before the first reward: mean 0, variance 1, with a weight of 1e-4 of one return."""
    zero = torch.zeros((), dtype=torch.float64)
    return ReturnScale(zero, zero + 1.0, zero + 1e-4, torch.zeros(batch, dtype=torch.float64))


def scale_rewards(
    rewards: Tensor, first: Tensor, scale: ReturnScale, *, gamma: float, clip: float
) -> tuple[Tensor, ReturnScale]:
    """`r / std of the discounted return so far`, clamped to +-clip (DPPO: 10): [T, B] float64, and the next scale.

    first [T, B]: the row begins an episode. The return up to a row is `R = r + gamma (1 - first) R_before`; its
    variance is merged over calls from counts and moments (over count - 1, as released), so that what came before keeps
    its weight.
    """
    returns = torch.zeros_like(rewards, dtype=torch.float64)
    running = scale.open_returns
    for t in range(len(rewards)):
        running = rewards[t].double() + torch.where(first[t].bool(), 0.0, gamma * running)
        returns[t] = running
    before, new = scale.weight, returns.numel()
    total = before + new
    shift = returns.mean() - scale.mean
    squares = scale.variance * before + returns.var(correction=0) * new + shift**2 * before * new / total
    merged = ReturnScale(scale.mean + shift * new / total, squares / (total - 1.0), total, running)
    return (rewards.double() / (merged.variance + 1e-8).sqrt()).clamp(-clip, clip), merged


def quantile_clip(advantages: Tensor, low: float, high: float) -> Tensor:
    """Advantages clamped to their own quantiles: DPPO's guard against outliers (0 and 1 change nothing)."""
    return advantages.clamp(advantages.quantile(low), advantages.quantile(high))
