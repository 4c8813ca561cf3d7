"""Losses of critics and of actors that learn from them, on action chunks: PPO's and DPPO's, implicit Q-learning.

Of an actor: elementwise, at whatever level the ratio has (chunk [B], action [B, C] or element [B, C, D]); advantages
broadcast against it. The clipped surrogate itself is `policy_losses.clipped_surrogate`; decoupled PPO is that with
advantages times `policy_losses.staleness_weight`.

IQL (arXiv 2110.06169) learns from a fixed data set and never asks about actions that it has not seen: V is an expectile
of Q over the actions of the data, Q is regressed on r + gamma V(s'), and a policy is cloned with weights that grow with
Q - V. All inputs [N] unless said otherwise; targets carry no gradient.
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


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """`|expectile - 1[d < 0]| d^2`, d = Q - V, elementwise: above .5 V leans to the best Q (IQL, eq. 5)."""
    return torch.where(difference < 0, (1.0 - expectile) * difference**2, expectile * difference**2)


def q_target(rewards: Tensor, next_values: Tensor, terminated: Tensor, discount: Tensor | float) -> Tensor:
    """`r + G (1 - terminated) V(s')`: what Q is regressed on (eq. 6). A time limit is bootstrapped, an end is not.

    discount G: gamma, or gamma^n [N] for a chunk of n executed actions (`episodes.chunk_rewards`, "smdp").
    """
    following = torch.where(terminated.bool(), 0.0, next_values.detach())
    return rewards + discount * following


def advantage_weights(q: Tensor, values: Tensor, *, temperature: float, largest: float) -> Tensor:
    """`min(exp(temperature (Q - V)), largest)`: weight [N] of a data action in the policy's regression (eq. 7).

    Advantage-weighted regression (arXiv 1910.00177) with IQL's critics. 0 clones the data; IQL has temperatures of .5
    to 10 and largest 100. Raises ValueError for a negative temperature.
    """
    if temperature < 0:
        raise ValueError(f"a negative temperature prefers bad actions, got {temperature}")
    exponent = temperature * (q.detach() - values.detach())
    # One action far better than its state's value would else be the whole batch.
    return torch.exp(exponent).clamp(max=largest)


# FISOR: feasibility-guided weighted diffusion cloning for safe offline learning (arXiv 2401.10700).
#
# A state is feasible where the best achievable worst violation V_h is at most 0; h is the violation of a state:
# negative (-1) where it is safe, positive (25 in the released code) where it is not. All inputs [N]; `mask` is 0 where
# the episode terminated, else 1.


def feasibility_target(violation: Tensor, next_values: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """`(1 - gamma) h + gamma max(h, V_h(s'))`, h at a terminal state: the reachability target of Q_h, [N]."""
    ahead = (1.0 - gamma) * violation + gamma * torch.maximum(violation, next_values.detach())
    return torch.where(mask.bool(), ahead, violation)


def reversed_expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """`|expectile - 1[d > 0]| d^2`, [N]: above .5 V leans to the lowest Q, the least violation (IQL, eq. 5, of -d)."""
    return expectile_loss(-difference, expectile)


def cloning_weights(
    q: Tensor,
    value: Tensor,
    violation_q: Tensor,
    violation_value: Tensor,
    *,
    reward_temperature: float = 3.0,
    cost_temperature: float = 5.0,
    largest_reward_weight: float = 100.0,
    largest_cost_weight: float = 150.0,
) -> Tensor:
    """Weight of each dataset action in the actor's noise regression, [N]; without gradient.

    `1[V_h > 0] min(exp(5 (V_h - Q_h)), 150) + 1[V_h <= 0 and Q_h <= 0] min(exp(3 (Q_r - V_r)), 100)`: in infeasible
    states towards less violation, in feasible ones towards reward among the actions that stay feasible.
    """
    q, value, violation_q, violation_value = (t.detach() for t in (q, value, violation_q, violation_value))
    escape = torch.exp(cost_temperature * (violation_value - violation_q)).clamp(max=largest_cost_weight)
    improve = torch.exp(reward_temperature * (q - value)).clamp(max=largest_reward_weight)
    feasible = violation_value <= 0
    return torch.where(feasible, torch.where(violation_q <= 0, improve, 0.0), escape)


def weighted_noise_loss(prediction: Tensor, noise: Tensor, weights: Tensor) -> Tensor:
    """Mean over N of `w ||e_hat - e||^2`, prediction and noise [N, D], weights [N]: weighted diffusion cloning. []."""
    return (weights.detach() * (prediction - noise).square().sum(-1)).mean()
