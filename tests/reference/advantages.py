"""Advantages of other trainers: Flow-GRPO's best samples, MixGRPO's aggregation, PaCo-RL's ranks and sums.

rewards [N] without missing scores, group [N] integers; float64 [N].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from genrl.objectives.advantages.groups import Scale, group_advantages


def best_of_group(rewards: Tensor, group: Tensor) -> Tensor:
    """1 for every sample that reaches its group's maximum, else 0 ("sft" of Flow-GRPO's tracker)."""
    best = {slot: rewards[group == slot].max() for slot in group.tolist()}
    return torch.stack([reward == best[slot] for reward, slot in zip(rewards, group.tolist(), strict=True)]).double()


def aggregated_advantages(
    rewards: Sequence[Tensor], weights: Sequence[float], group: Tensor, *, trim_ratio: float = 0.0, eps: float = 1e-8
) -> Tensor:
    """`sum_k w_k / (sum w) (r_k - mean_g) / (std_g + eps)`, sample std: MixGRPO's (arXiv 2507.21802, code).

    trim_ratio t leaves the lowest floor(t n) scores of a group of n out of its mean and std; they keep an advantage.
    """
    result = torch.zeros(len(group), dtype=torch.float64)
    for reward, weight in zip(rewards, weights, strict=True):
        for slot in group.unique():
            members = group == slot
            scores = reward[members].double()
            kept = scores.sort().values[int(trim_ratio * len(scores)) :]
            result[members] += weight / sum(weights) * (scores - kept.mean()) / (kept.std() + eps)
    return result


def sum_of_advantages(rewards: Sequence[Tensor], weights: Sequence[float], group: Tensor, *, scale: Scale) -> Tensor:
    """`sum_k w_k A_k`, each reward normalised by itself (`max(std, 1e-6)`): PaCo-RL's weighted advantage sum."""
    parts = (group_advantages(reward, group, scale=scale, eps=1e-6, eps_mode="floor") for reward in rewards)
    return sum((w * part for w, part in zip(weights, parts, strict=True)), torch.zeros(len(group), dtype=torch.float64))
