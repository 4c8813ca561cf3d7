"""Credit of turns that are compared with an expert's (UI-S1, arXiv 2509.11543). float64, no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.objectives.advantages.groups import group_advantages


def semi_online_returns(rewards: Tensor, matched: Tensor, *, gamma: float) -> Tensor:
    """What a turn brings later, R [B, K]: `R_k = r_k + gamma R_k+1` from an action that is the expert's, `R_k = r_k`
    from another, and nothing that comes with or after the other counts for those before it.

    rewards float [B, K], NaN after a row's last turn; matched bool [B, K]. NaN stays NaN. The paper sums up to the end
    of the stretch that the policy walked by itself; that a mismatch is no part of it is its code's reading.
    """
    reward = rewards.detach().double()
    running, found = torch.zeros(len(reward), dtype=torch.float64), []
    for k in range(reward.shape[1] - 1, -1, -1):
        running = torch.where(matched[:, k].bool(), reward[:, k] + gamma * running, torch.zeros_like(running))
        own = torch.where(matched[:, k].bool(), running, reward[:, k])
        running = running.nan_to_num(nan=0.0)
        found.append(torch.where(reward[:, k].isnan(), torch.nan, own))
    return torch.stack(found[::-1], 1)


def semi_online_advantages(
    rewards: Tensor, matched: Tensor, group: Tensor, *, gamma: float, episode: float, step: float
) -> Tensor:
    """`episode (R - mean) / std + step (R_k - mean_k) / std_k`, [B, K], 0 where there is no turn.

    R is the sum of an episode's rewards, compared with those of its group int64 [B]; R_k is `semi_online_returns`,
    compared with those of the same turn in its group. Sample deviations, + 1e-6; 0 where one is alone. Those
    of R are over episodes, as in the paper; the code takes mean and deviation over all turns of the group.
    """
    returns = semi_online_returns(rewards, matched, gamma=gamma)
    there = ~rewards.isnan()
    sums = torch.where(there.any(1), rewards.double().nansum(1), torch.nan)
    whole = group_advantages(sums, group, scale="group", eps=1e-6, ddof=1)
    turn = group[:, None] * rewards.shape[1] + torch.arange(rewards.shape[1])
    alone = group_advantages(returns.flatten(), turn.flatten(), scale="group", eps=1e-6, ddof=1).view_as(returns)
    return torch.where(there, episode * whole[:, None] + step * alone, 0.0)
