"""Losses of an actor and a critic on action chunks: dual clip, value losses, DPPO's inner weights.

Elementwise unless said otherwise, at whatever level the ratio has (chunk [B], action [B, C] or element [B, C, D]);
advantages broadcast against it. The clipped surrogate itself is `policy_losses.clipped_surrogate`; decoupled PPO is
that with advantages times `policy_losses.staleness_weight`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dual_clip(loss: Tensor, advantage: Tensor, bound: float) -> Tensor:
    """`min(loss, c |A|)`: a surrogate loss bounded where A < 0 and the ratio explodes (arXiv 1912.09729, eq. 5).

    Elementwise, any shape. bound c > 1 (3 is usual). For A > 0 the loss is never positive and the bound never binds.
    """
    if bound <= 1:
        raise ValueError(f"the bound of a dual clip must exceed 1, got {bound}")
    return torch.minimum(loss, bound * advantage.detach().abs().to(loss.dtype))


def value_loss(
    values: Tensor,
    returns: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> Tensor:
    """`(R - V)^2 / 2`, or its Huber form: linear beyond huber_delta (10 in pi_RL). Elementwise, any shape.

    With clip: the larger of the losses of V and of `V_old + clamp(V - V_old, +-clip)` (PPO's value clip, .2).
    Raises ValueError where a clip has no old values.
    """
    plain = _half_square(returns - values, huber_delta)
    if clip is None:
        return plain
    if old_values is None:
        raise ValueError("a clipped value loss needs the values of the rollout: old_values")
    # The larger of two losses: the clip may hold the critic back, and never rewards it for moving further off.
    near = old_values.detach() + (values - old_values.detach()).clamp(-clip, clip)
    return torch.maximum(plain, _half_square(returns - near, huber_delta))


def approximate_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """`r - 1 - ln r`, r = pi / pi_old, elementwise: never negative, its mean under pi_old is KL(pi_old || pi).

    The stop of PPO's epochs: leave an iteration's updates once its mean exceeds a bound (.3 for chunk sums, 1 in DPPO).
    """
    difference = (log_prob - old_log_prob).detach()
    # expm1: near a ratio of 1, where it is used, exp - 1 loses the digits that decide.
    return difference.expm1() - difference


def denoising_discount(index: Tensor, steps: int, gamma: float) -> Tensor:
    """`gamma^(K' - 1 - i)`, shape of index: DPPO's weight of the advantage at fine-tuned step i (arXiv 2409.00588).

    Step 0 is the noisiest.
    """
    return gamma ** (steps - 1 - index.double())


def denoising_clip(index: Tensor, steps: int, *, clip: float, base: float, rate: float = 3.0) -> Tensor:
    """DPPO's clip range at fine-tuned step i, shape of index: from base at the noisiest to clip at the last.

    `base + (clip - base) (e^(rate t) - 1) / (e^rate - 1)`, t = i / (K' - 1); with one step (K' = 1, where the released
    code divides 0 by 0) it is clip.
    """
    if steps == 1:
        return torch.full(index.shape, clip, dtype=torch.float64)
    place = index.double() / (steps - 1)
    return base + (clip - base) * torch.expm1(rate * place) / math.expm1(rate)


def _half_square(error: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return 0.5 * error**2
    size = error.abs()
    return torch.where(size <= huber_delta, 0.5 * error**2, huber_delta * (size - 0.5 * huber_delta))
