"""Rewards of token policies that come from lengths, log-probabilities, views or written scores: pure tensors.

Rules on the text itself are in the package `rewards`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from genrl.objectives.tokens.token_regularisers import kl_k1
from genrl.objectives.tokens.tokens import masked, row_sum, token_count


def overlong_penalty(lengths: Tensor, *, maximum: int, buffer: int) -> Tensor:
    """0 up to `maximum - buffer` tokens, then linearly down to -1 at `maximum`, [N]: DAPO (eq. 13)."""
    if not 0 < buffer <= maximum:
        raise ValueError(f"the buffer must be between 1 and the maximum of {maximum} tokens, got {buffer}")
    return -((lengths.double() - (maximum - buffer)) / buffer).clamp(0.0, 1.0)


def answer_confidence(ref_log_prob: Tensor, answer_mask: Tensor, *, cap: float = 0.95) -> Tensor:
    """`min(exp(mean log-probability of the answer's tokens under the reference), cap)`, [N]: GRPO-CARE.

    ref_log_prob [N, T] of a reference that read the policy's reasoning, answer_mask [N, T]. A row without an answer has
    `cap`. The mean divides by n + 1e-6, as the released trainer does.
    """
    mean = row_sum(ref_log_prob.detach(), answer_mask) / (token_count(answer_mask).to(ref_log_prob) + 1e-6)
    return mean.exp().clamp(max=cap)


def consistency_bonus(
    accuracy: Tensor,
    confidence: Tensor,
    group: Tensor,
    *,
    coefficient: float = 0.5,
    margin: float = 0.0,
    floor: float = 0.1,
) -> Tensor:
    """Bonus for answers that the reference finds likely given the reasoning, [N]: GRPO-CARE (arXiv 2506.16141).

    Of the rows of a group with accuracy > floor and not below the group's mean: `coefficient * accuracy` where the
    confidence (`answer_confidence`) is at least the mean of those rows less the margin, else 0.
    margin: 0 on SEED-Bench-R1, .01 for general video.
    """
    bonus = torch.zeros_like(confidence)
    index = torch.unique(group, return_inverse=True)[1]
    for slot in range(int(index.max()) + 1):
        members = index == slot
        selected = members & (accuracy > floor) & (accuracy >= accuracy[members].mean())
        if bool(selected.any()):
            enough = confidence >= confidence[selected].mean() - margin
            bonus = torch.where(selected & enough, coefficient * accuracy.to(bonus), bonus)
    return bonus


def with_kl(token_rewards: Tensor, log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor, *, beta: float) -> Tensor:
    """`r_t - beta (l - l_ref)` per token, [N, T], no gradient: the KL in the reward of InstructGPT (arXiv 2203.02155,
    eq. 2), REINFORCE++ and R1-Reward."""
    penalty = kl_k1(masked(log_prob.detach(), mask), masked(ref_log_prob, mask))
    return masked(token_rewards - beta * penalty, mask)


def over_views(scores: Tensor, rule: Literal["max", "sum", "mean"]) -> Tensor:
    """One reward [N] of scores [N, V] of V rendered views of a 3D object.

    AR3D-R1 (arXiv 2512.10949): HPSv2.1 takes the best view, UnifiedReward the sum.
    """
    if rule == "max":
        return scores.amax(dim=1)
    if rule == "sum":
        return scores.sum(dim=1)
    if rule == "mean":
        return scores.mean(dim=1)
    raise ValueError(f"rule must be 'max', 'sum' or 'mean', got {rule!r}")
