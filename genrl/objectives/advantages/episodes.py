"""Which steps of a batch of rollouts belong to an episode, what the episode was worth, and which groups can teach.

Shapes: T rows of B environments, C actions per row. done [T, B, C]: an episode ended with that action. Groups are
integers [B]; environments of one group start from the same initial state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.objectives.advantages.groups import group_advantages


def valid_transitions(done: Tensor, carried: Tensor) -> Tensor:
    """Which rows are transitions of an episode under gymnasium's next-step auto-reset, bool [T, B].

    In that mode the row after a done only resets: its action is ignored, its reward 0, and its observation begins the
    next episode. done [T, B]; carried [B]: the row before the first was a done (all false after a reset).
    """
    before = torch.cat([carried[None].bool(), done[:-1].bool()])
    return ~before


def first_episode_steps(done: Tensor) -> Tensor:
    """Which actions belong to the first episode of their column, the one that ends it included: bool [T, B, C]."""
    flat = done.bool().transpose(1, 2).flatten(0, 1)  # [T C, B]
    # Less the step itself: the one that ends an episode still belongs to it.
    ended_before = flat.long().cumsum(0) - flat.long() > 0
    return ~ended_before.view(done.shape[0], done.shape[2], done.shape[1]).transpose(1, 2)


def first_episode_returns(rewards: Tensor, done: Tensor) -> Tensor:
    """Sum of the rewards of the first episode of each column, undiscounted: rewards and done [T, B, C] -> [B]."""
    return torch.where(first_episode_steps(done), rewards.double(), 0.0).sum((0, 2))


def episode_group_advantages(returns: Tensor, group: Tensor) -> Tensor:
    """GRPO over episodes from one initial state: `(R - mean_g) / (std_g + 1e-6)`, sample std, float64 [B].

    All decisions of an episode have its advantage. Source: pi_RL's GRPO (arXiv 2510.25889, code).
    """
    return group_advantages(returns, group, scale="group", eps=1e-6, ddof=1)


def informative_groups(returns: Tensor, group: Tensor, *, low: float, high: float) -> Tensor:
    """Which samples are in a group whose mean return lies in [low, high], bool [B]: the success filter, .1 to .9.

    Groups that always or never succeed have no gradient under GRPO and little under PPO (pi_RL, SimpleVLA-RL,
    arXiv 2509.09674). Log the share of groups kept: below about 15 % a policy has next to nothing to learn from.
    """
    index = torch.unique(group, return_inverse=True)[1]
    empty = torch.zeros(int(index.max()) + 1, dtype=torch.float64, device=returns.device)
    count = empty.index_add(0, index, torch.ones_like(returns, dtype=torch.float64))
    mean = empty.index_add(0, index, returns.double()) / count
    slack = 1e-6  # a mean of float32 rewards that equals a bound counts as inside
    return ((mean >= low - slack) & (mean <= high + slack))[index]
