"""Terms beside the policy loss of token policies (KL estimates, entropy, perception, value), and beside their rewards:
those that come from lengths, log-probabilities, views or written scores (rules on the text itself: `genrl_rewards`).

`policy_losses.kl_k2` and `kl_k3` are the other two estimates. Shapes and masks as in `tokens.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from genrl.objectives.policy_losses import kl_k3
from genrl.objectives.tokens import masked, row_sum, token_count, token_mean


def kl_k1(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """`l - l_ref`, elementwise: unbiased for KL(policy || reference), of either sign; its own gradient has mean 0.

    It is therefore subtracted from rewards (REINFORCE++, R1-Reward), not added to losses.
    """
    return log_prob - ref_log_prob.detach()


def kl_k3_clamped(
    log_prob: Tensor, ref_log_prob: Tensor, *, difference_limit: float = 20.0, limit: float = 10.0
) -> Tensor:
    """`min(kl_k3, limit)` of `d = clip(l_ref - l, -+difference_limit)`, elementwise: k3 (GRPO, eq. 4) of verl, EasyR1.

    No gradient outside of the limits.
    """
    difference = (ref_log_prob.detach() - log_prob).clamp(-difference_limit, difference_limit)
    return kl_k3(-difference, torch.zeros_like(difference)).clamp(max=limit)


def kl_categorical(log_rows: Tensor, ref_log_rows: Tensor) -> Tensor:
    """`sum_a pi (log pi - log pi_ref)` of whole log-softmax rows [..., V], exact: [...]. Gradient through `log_rows`.

    MusicRL's KL (arXiv 2402.04229); VPPO's dependency as its paper has it (policy with and without the picture).
    """
    return (log_rows.exp() * (log_rows - ref_log_rows.detach())).sum(dim=-1)


def sampled_entropy(log_prob: Tensor, mask: Tensor) -> Tensor:
    """`-mean l` over the tokens of the call, []: one sample's estimate of the entropy, with the gradient VPPO takes."""
    return token_mean(-log_prob, mask)


def entropy_band(entropy: Tensor, low: float, high: float) -> Tensor:
    """`max(0, H - high) + max(0, low - H)`, elementwise: no cost inside the band (OpenVLThinkerV2, SPINE).

    Raises ValueError for low > high.
    """
    if low > high:
        raise ValueError(f"an entropy band needs low <= high, got {low} and {high}")
    return (entropy - high).clamp(min=0.0) + (low - entropy).clamp(min=0.0)


def perception_loss(
    log_prob: Tensor,
    degraded_log_prob: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1e-4,
    eta: float = 1e-3,
    rows: int | None = None,
) -> Tensor:
    """`-gamma K - eta mean_b sum_t l`, []: Q-Hawkeye's perception loss. The answer must depend on the quality seen.

    K is the token mean of `kl_k3_clamped` against the same tokens read with a degraded picture (current policy, no
    gradient). The published third term, on the entropy with the degraded picture, has no gradient in the released code.
    Rows without a degraded twin have mask 0. rows: B of the whole step; see `tokens.aggregate`.
    """
    share = 1.0 if rows is None else len(mask) / rows
    divergence = token_mean(kl_k3_clamped(log_prob, degraded_log_prob), mask)
    return share * (-gamma * divergence - eta * row_sum(log_prob, mask).mean())


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, *, clip: float = 0.1) -> Tensor:
    """`max((V - R)^2, (V_old + clip(V - V_old, -+clip) - R)^2)`, elementwise: PPO's value loss; VL-DAC takes half."""
    old, target = old_value.detach(), returns.detach()
    near = old + (value - old).clamp(-clip, clip)
    # The larger of the two: to leave the neighbourhood of the old value is never cheaper than to stay.
    return torch.maximum((value - target) ** 2, (near - target) ** 2)


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
