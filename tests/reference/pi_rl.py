"""RLinf, the code of pi_RL (arXiv 2510.25889): how it bootstraps cut chunks and averages over episodes."""

from __future__ import annotations

import torch
from torch import Tensor


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
