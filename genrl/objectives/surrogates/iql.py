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

    discount G: gamma, or gamma^n [N] for a chunk of n executed actions (`gae.chunk_rewards`, "smdp").
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
    return torch.exp(exponent).clamp(max=largest)
