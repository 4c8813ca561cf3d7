"""Matching losses: learn on noised samples instead of sampling steps (DiffusionNFT, AWM, DGPO, CRD).

They noise finished samples, `noisy = (1 - sigma) clean + sigma noise`, and compare velocity errors there: any solver
may sample, no log-probability of a step is needed.
Time: sigma = 1 noise, sigma = 0 data, velocity = noise - data; `target` is that velocity, noise - clean.
Shapes: clean, noisy, velocities and target [B, ...]; sigma a float, [] or [B]; errors, weights, advantages and losses
per sample, [B].

Last the schedules of a snapshot that follows the trained weights: d in `snapshot <- d snapshot + (1 - d) weights`, by
optimiser step; 0 copies the weights, 1 keeps it. Published ones beside `nft_old_policy_decay` and `ema_decay`:

- AWM's and DGPO's reference: `ramp(n, slope=.001, maximum=.3)`
- CRD's old policy: `ramp(n, start_value=.25, slope=.005, maximum=.999)`; its sampling policy:
  `ramp(n, start_step=75, slope=.0075, maximum=.999)`
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

OldPolicyDecay = Literal["none", "ramp", "delayed_ramp"]


def nft_reward_weight(advantage: Tensor, clip: float = 5.0) -> Tensor:
    """DiffusionNFT's probability of being a positive sample, `r = clamp(A / clip, -1, 1) / 2 + 1/2` in [0, 1].

    Source: arXiv 2509.16117, the optimality probability of its algorithm 1. Raises ValueError for clip <= 0.
    """
    if clip <= 0:
        raise ValueError(f"the advantage clip must be positive, got {clip}")
    return (advantage.detach() / clip / 2.0 + 0.5).clamp(0.0, 1.0)


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


def _normalised_error(prediction: Tensor, clean: Tensor) -> Tensor:
    difference = (prediction - clean).reshape(clean.shape[0], -1)
    # In float64, and from 1e-5 up, as in the released code; without gradient, or large errors would be rewarded.
    scale = difference.detach().abs().double().mean(dim=1).clamp(min=1e-5).to(difference.dtype)
    return difference.square().mean(dim=1) / scale


def matching_error(velocity: Tensor, target: Tensor) -> Tensor:
    """`<(v - u)^2>`, the flow-matching loss, mean over the elements of each sample: [B].

    float32 (float64 if either is). Gradient through `velocity` only.
    """
    return _difference(velocity, target).square().mean(dim=1)


# Advantage weighted matching (arXiv 2509.25050) ----------------------------------------------------------------------


def awm_log_prob(velocity: Tensor, target: Tensor, sigma: Tensor | float) -> Tensor:
    """AWM's log-likelihood of a sample, a bound up to a constant: its negative, weighted matching error m. [B].

    `-((m + 1e-10)^p - 1e-10^p) sigma / p` with p = 1/4, "ghuber", the default of the released code. It goes into
    `policy_losses.clipped_surrogate`, for each noise ("exp_first") or averaged over a sample's noises ("sum_first").
    """
    error, power = matching_error(velocity, target), 0.25
    time = torch.as_tensor(sigma, dtype=error.dtype, device=error.device)
    return -((error + 1e-10).pow(power) - math.pow(1e-10, power)) * time / power


def awm_advantage(advantage: Tensor, *, clip: float = 5.0) -> Tensor:
    """`clamp(A, -clip, clip) / clip`, [B]: AWM rescales advantages to +-1, Flow-Factory clamps them.

    Raises ValueError for clip <= 0.
    """
    if clip <= 0:
        raise ValueError(f"the advantage clip must be positive, got {clip}")
    return advantage.detach().clamp(-clip, clip) / clip


# Direct group preference optimisation (arXiv 2510.08425) -------------------------------------------------------------


def dgpo_group_weight(error: Tensor, ref_error: Tensor, advantage: Tensor, group: Tensor, *, beta: float) -> Tensor:
    """`sigmoid(S_g)` of each sample's group, [B], without gradient: how wrongly the group is ordered yet.

    `S_g = beta / K sum_{i in g} A_i (m_theta,i - m_ref,i)`, m the matching errors under the present and the reference
    policy at one noise and level for the whole group. group: int64 [B]; every group of it must be whole, K its size.
    """
    index, size = _index(group)
    terms = _host(advantage) * (_host(error) - _host(ref_error))
    return torch.sigmoid(beta * _group_sum(terms, index) / size)[index].to(error.dtype).to(error.device)


def dgpo_loss(error: Tensor, old_error: Tensor, advantage: Tensor, group_weight: Tensor, *, clip: float) -> Tensor:
    """`w_g A_i m_theta,i`, [B], whose gradient is that of -log sigmoid of the group's preference.

    Clip: where `q = exp(m_old - m_theta)`, the ratio to the old policy, has gone beyond 1 + clip for A > 0, or below
    1 - clip for A <= 0, the sample has a value but no gradient. Gradient through `error` only.
    Raises ValueError for a negative clip range.
    """
    if clip < 0:
        raise ValueError(f"a clip range cannot be negative, got {clip}")
    weight = advantage.detach().to(error.dtype)
    done = dgpo_clipped(error, old_error, advantage, clip=clip)
    return group_weight.detach() * weight * torch.where(done, error.detach(), error)


def dgpo_clipped(error: Tensor, old_error: Tensor, advantage: Tensor, *, clip: float) -> Tensor:
    """Whether a sample is beyond the clip range of `dgpo_loss`, bool [B]."""
    ratio = torch.exp(old_error.detach() - error.detach())
    return torch.where(advantage > 0, ratio > 1.0 + clip, ratio < 1.0 - clip)


# Centred reward distillation (arXiv 2603.14128) ----------------------------------------------------------------------


class Centre(NamedTuple):
    """The point that a group's implicit rewards and targets are measured from, one value per sample, [B]."""

    implicit: Tensor
    target: Tensor


def implicit_reward(velocity: Tensor, old_velocity: Tensor, target: Tensor) -> Tensor:
    """`r_theta = e_old - e_theta`: the reward under which the present policy would be optimal around the old one. [B].

    `e = <(v - u)^2> / <|v - u|>`, the divisor without gradient, at least 1e-5, for each of the two.
    """
    return _scaled_error(old_velocity.detach(), target) - _scaled_error(velocity, target)


def group_centres(implicit: Tensor, target: Tensor, group: Tensor) -> Centre:
    """The means of each sample's group.

    The reward of a KL-regularised optimum equals r_theta up to a constant of the prompt, which centring within the
    prompt removes. implicit, target [N]; group int64 [N] (Flow-Factory centres over the whole batch: give all one
    group). No gradient; float64 on the host.
    """
    index, size = _index(group)
    return Centre(*((_group_sum(_host(values), index) / size)[index] for values in (implicit, target)))


def crd_loss(implicit: Tensor, target: Tensor, centre: Centre, *, beta: float = 1.0) -> Tensor:
    """`[beta (r_theta - centre) - (a - centre)]^2`, [B].

    The released trainer multiplies by `advantage clip / beta`. Gradient through `implicit` only, not the centre.
    """
    predicted = beta * (implicit - _like(centre.implicit, implicit))
    aim = _like(target.detach(), implicit) - _like(centre.target, implicit)
    return (predicted - aim).square()


def reward_adaptive_weight(target: Tensor, kl_weight: float, *, minimum: float = 1e-4) -> Tensor:
    """`m + a (kl_weight - m)`: the KL weight of each sample, [B]; good ones are kept closer to the reference.

    With `policy_losses.kl_velocity` to the pretrained model (under its guidance) it is CRD's reward-adaptive KL. m is
    `minimum`, or a kl_weight below it: then all have the same weight, where the formula would give good ones less.
    """
    least = min(minimum, kl_weight)
    return least + target.detach() * (kl_weight - least)


def _scaled_error(velocity: Tensor, target: Tensor) -> Tensor:
    difference = _difference(velocity, target)
    # Detached: with its gradient the weight would reward large errors.
    return difference.square().mean(dim=1) / difference.detach().abs().mean(dim=1).clamp(min=1e-5)


def _difference(velocity: Tensor, target: Tensor) -> Tensor:
    """[B, D]; nothing flows into the target."""
    dtype = torch.promote_types(torch.promote_types(velocity.dtype, target.dtype), torch.float32)
    return (velocity.to(dtype) - target.detach().to(dtype)).flatten(1)


def _host(values: Tensor) -> Tensor:
    return values.detach().cpu().double()


def _like(values: Tensor, other: Tensor) -> Tensor:
    return values.to(other.dtype).to(other.device)


def _index(group: Tensor) -> tuple[Tensor, Tensor]:
    """Dense group index of each sample, and the size of each group (float64), on the host."""
    index: Tensor = torch.unique(group.cpu(), return_inverse=True)[1]
    return index, torch.bincount(index).double()


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    return values.new_zeros(int(index.max()) + 1).index_add(0, index, values)


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


def ramp(step: int, *, slope: float, maximum: float, start_step: int = 0, start_value: float = 0.0) -> float:
    """`min(start_value + slope (n - start_step), maximum)`, and start_value before start_step."""
    return min(start_value + slope * max(step - start_step, 0), maximum)


def cosine(step: int, *, initial: float, final: float, total_steps: int) -> float:
    """Half a cosine from `initial` to `final` over the steps up to total_steps: Flow-Factory's "cosine"."""
    progress = min(step / total_steps, 1.0)
    return initial + (final - initial) * (1.0 - math.cos(math.pi * progress)) / 2.0
