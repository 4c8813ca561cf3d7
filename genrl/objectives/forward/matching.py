"""Matching losses: learn on noised samples instead of sampling steps, with their old-policy schedules.

Time: sigma = 1 noise, sigma = 0 data, velocity = noise - data, `noisy = (1 - sigma) clean + sigma noise`.
Shapes: clean, noisy and velocities [B, ...]; sigma a float, [] or [B]; weights [B]. Losses are per sample, [B].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]
OldPolicyDecay = Literal["none", "ramp", "delayed_ramp"]


def nft_reward_weight(advantage: Tensor, clip: float = 5.0, *, mode: AdvantageMode = "all") -> Tensor:
    """DiffusionNFT's probability of being a positive sample, `r = clamp(A / clip, -1, 1) / 2 + 1/2` in [0, 1].

    mode changes the clipped advantage first (released configuration): "positive_only" and "negative_only" clamp it
    to that side, "one_only" is 1 for a positive one and 0 otherwise, "binary" its sign.
    Source: arXiv 2509.16117, the optimality probability of its algorithm 1. Raises ValueError for clip <= 0.
    """
    if clip <= 0:
        raise ValueError(f"the advantage clip must be positive, got {clip}")
    clipped = advantage.detach().clamp(-clip, clip)
    if mode == "positive_only":
        clipped = clipped.clamp(min=0.0)
    elif mode == "negative_only":
        clipped = clipped.clamp(max=0.0)
    elif mode == "one_only":
        clipped = (clipped > 0).to(clipped)
    elif mode == "binary":
        clipped = clipped.sign()
    elif mode != "all":
        raise ValueError(f"mode must be all, positive_only, negative_only, one_only or binary, got {mode!r}")
    return (clipped / clip / 2.0 + 0.5).clamp(0.0, 1.0)


def diffusion_nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    noisy: Tensor,
    clean: Tensor,
    sigma: Tensor | float,
    reward_weight: Tensor,
    *,
    beta: float,
    advantage_clip: float = 5.0,
) -> Tensor:
    """DiffusionNFT (arXiv 2509.16117): regress towards good samples and away from bad ones around the old policy.

    Implicit policies `v+ = beta v + (1 - beta) v_old`, `v- = (1 + beta) v_old - beta v`; their predictions
    `x0+- = noisy - sigma v+-` have errors `e+- = <(x0+- - clean)^2> / w+-`, w+- = <|x0+- - clean|> without gradient,
    at least 1e-5; the loss is `advantage_clip / beta (r e+ + (1 - r) e-)` with r = reward_weight (released code: the
    self-normalising weight, and the factor, which undoes the division of the advantage in r).

    Gradient through `velocity` only. float32 (float64 if clean and velocity are). Returns [B].
    Raises ValueError for beta <= 0.
    """
    if beta <= 0:
        raise ValueError(f"beta must be positive, got {beta}")
    dtype = torch.float64 if velocity.dtype == clean.dtype == torch.float64 else torch.float32
    new, old = velocity.to(dtype), old_velocity.detach().to(dtype)
    noisy, clean = noisy.detach().to(dtype), clean.detach().to(dtype)
    time = torch.as_tensor(sigma, dtype=dtype, device=clean.device).reshape(-1, *[1] * (clean.dim() - 1))
    # The network appears in both: towards the good, and by the reflection at the old policy away from the bad.
    positive = _normalised_error(noisy - time * (beta * new + (1.0 - beta) * old), clean)
    negative = _normalised_error(noisy - time * ((1.0 + beta) * old - beta * new), clean)
    weight = reward_weight.detach().to(clean)
    return advantage_clip / beta * (weight * positive + (1.0 - weight) * negative)


def nft_old_policy_decay(step: int, kind: OldPolicyDecay) -> float:
    """d in `theta_old <- d theta_old + (1 - d) theta` after `step` optimiser steps (DiffusionNFT's released schedules).

    "none" 0 (the old policy is the last one), "ramp" min(.001 n, .5), "delayed_ramp" 0 until n = 75, then
    min(.0075 (n - 75), .999).
    """
    if kind == "none":
        return 0.0
    if kind == "ramp":
        return min(0.001 * step, 0.5)
    if kind == "delayed_ramp":
        return 0.0 if step < 75 else min(0.0075 * (step - 75), 0.999)
    raise ValueError(f"the old-policy decay must be none, ramp or delayed_ramp, got {kind!r}")


def ema_decay(step: int, maximum: float = 0.9) -> float:
    """`min((1 + n) / (10 + n), maximum)`: an average that forgets its start; Flow-GRPO's evaluation weights."""
    return min((1.0 + step) / (10.0 + step), maximum)


def _normalised_error(prediction: Tensor, clean: Tensor) -> Tensor:
    difference = (prediction - clean).reshape(clean.shape[0], -1)
    # In float64, and from 1e-5 up, as in the released code; without gradient, or large errors would be rewarded.
    scale = difference.detach().abs().double().mean(dim=1).clamp(min=1e-5).to(difference.dtype)
    return difference.square().mean(dim=1) / scale
