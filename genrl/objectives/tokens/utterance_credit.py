"""Credit of whole utterances from a critic that learns off policy (ArCHer, arXiv 2402.19446, section 3). Each of two
critics has a Q of (observation, utterance) and a V of the observation, and slow copies of both are their targets."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CriticLosses(NamedTuple):
    """q and v, [] each: mean squares over the turns, summed over the critics."""

    q: Tensor
    v: Tensor


def critic_losses(
    q: Tensor, v: Tensor, target_q: Tensor, target_v: Tensor, rewards: Tensor, terminated: Tensor, *, gamma: float
) -> CriticLosses:
    """`mean (Q(o, a) - r - gamma (1 - e) V'(o'))^2` and `mean (V(o) - Q'(o, u))^2`, V' and Q' of the slow copies.

    a is what was said in a stored turn, u what the policy says now; q [C, B] of a, v [C, B], target_q [C, B] of u,
    target_v [C, B] of the next observation, rewards and terminated [B]. No gradient goes to the targets.
    """
    goal = rewards + gamma * (1.0 - terminated.to(rewards)) * target_v.detach()
    return CriticLosses((q - goal).square().mean(1).sum(), (v - target_q.detach()).square().mean(1).sum())


def utterance_advantages(q: Tensor, v: Tensor) -> Tensor:
    """`min over the critics of Q(o, u) - min of V(o)`, [B], of q and v [C, B] (its code)."""
    return (q.min(0).values - v.min(0).values).detach()


def utterance_loss(log_prob: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """`- mean_b A_b sum_t log pi(u_t | o, u_<t)`, []: all tokens of an utterance have its advantage."""
    return -(torch.where(mask.bool(), log_prob, 0.0).sum(1) * advantages).mean()
