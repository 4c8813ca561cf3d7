"""Credit of the turns of episodes, each compared with the same turn of its group's others: TRLOO (arXiv 2602.05885).
float64, no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.objectives.tokens.semi_online import semi_online_returns
from genrl.objectives.tokens.token_advantages import leave_one_out


def turn_returns(rewards: Tensor, *, gamma: float) -> Tensor:
    """`G_k = r_k + gamma G_k+1`, [B, K]; rewards float [B, K], NaN after a row's last turn, which stays NaN."""
    return semi_online_returns(rewards, torch.ones_like(rewards, dtype=torch.bool), gamma=gamma)


def turn_leave_one_out(rewards: Tensor, group: Tensor, *, gamma: float) -> Tensor:
    """`G_k - mean of the others' G_k`, [B, K]: the others are the episodes of its group int64 [B] that have a turn k.

    0 where there is no turn. A turn that no other episode has keeps its G_k, as in the released code.
    """
    returns = turn_returns(rewards, gamma=gamma)
    there = ~returns.isnan()
    turn = torch.unique(group, return_inverse=True)[1][:, None] * rewards.shape[1] + torch.arange(rewards.shape[1])
    compared = leave_one_out(returns.flatten(), turn.flatten()).view_as(returns)
    alone = (torch.bincount(turn[there], minlength=int(turn.max()) + 1) == 1)[turn]
    return torch.where(there, torch.where(alone, returns, compared), 0.0)
