"""LayerTuning-RL of Dynamic-TreeRPO (arXiv 2509.23352): supervised learning as a weighted progress reward.

The paper's text was not available: its abstract and reviews give the shape (the supervised target is the
velocity on the best path of the group, weighted by how far a sample falls short; clip bounds that follow the reward).
The formulas are this project's definition of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dynamic_clip_bounds(advantage: Tensor, *, low: float, high: float, sensitivity: float) -> tuple[Tensor, Tensor]:
    """(lower, upper): the ratio is kept in 1 - lower .. 1 + upper; each has the shape of the advantage.

    `s = tanh |A|`: upper is `high (1 + eta s)` for A > 0, else `high`; lower is `low (1 + eta s)` for A < 0, else
    `low`: the more a sample tells, the further it may move the policy. For an edge, A is the mean of its leaves'.
    eta = sensitivity (0.5 in our runs). Raises ValueError for a bound that is not positive or a negative sensitivity.
    """
    if low <= 0 or high <= 0 or sensitivity < 0:
        raise ValueError(
            f"clip bounds must be positive, the sensitivity not negative; got {low}, {high}, {sensitivity}"
        )
    size = 1.0 + sensitivity * advantage.detach().abs().tanh()
    lower = torch.where(advantage < 0, low * size, torch.full_like(size, low))
    upper = torch.where(advantage > 0, high * size, torch.full_like(size, high))
    return lower, upper


def progress_weights(rewards: Tensor, eps: float = 1e-8) -> Tensor:
    """`(R_max - R) / (R_max - R_min + eps)` over the last dimension, in [0, 1]: 0 for the best leaf of a group.

    All equal gives 0 everywhere. NaN (no score) gives 0 and counts for neither end.
    """
    values = rewards.detach().double()
    highest = values.nan_to_num(-torch.inf).amax(-1, keepdim=True)
    lowest = values.nan_to_num(torch.inf).amin(-1, keepdim=True)
    return ((highest - values) / (highest - lowest + eps)).nan_to_num(0.0)


def progress_loss(weights: Tensor, velocity: Tensor, target: Tensor) -> Tensor:
    """`w mean (v - sg target)^2` per sample, [B]: what the policy-gradient loss gets lambda times (0.1 in our runs).

    weights [B]; velocity and target [B, ...], the target being the old policy's velocity on the best leaf's path at the
    same step, or `velocity_towards` the best leaf. Gradient through `velocity` only.
    """
    errors = (velocity - target.detach().to(velocity)).square().flatten(1).mean(1)
    return weights.detach().to(errors) * errors


def velocity_towards(x: Tensor, clean: Tensor, sigma: Tensor | float) -> Tensor:
    """`(x - x0) / sigma`: the velocity that takes this state to a given picture in one step, float32 [B, ...].

    The sound target for a sample off the best path, whose velocity belongs to another state. sigma in (0, 1], a float,
    [] or [B].
    """
    level = torch.as_tensor(sigma, dtype=torch.float32, device=x.device).reshape(-1, *[1] * (x.dim() - 1))
    if not bool((level > 0).all()):
        raise ValueError("a finished sample (sigma 0) has no velocity towards another")
    return (x.float() - clean.float()) / level
