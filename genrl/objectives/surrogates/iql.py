"""Implicit Q-learning: a critic from a fixed data set that is never asked about actions it has not seen.

IQL (arXiv 2110.06169): V is an expectile of Q over the actions of the data, Q is regressed on r + gamma V(s'), and a
policy is cloned with weights that grow with Q - V. All inputs [N] unless said otherwise; targets carry no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
