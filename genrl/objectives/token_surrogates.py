"""Surrogates of the GRPO family: from token log-probabilities and advantages to loss terms.

Each takes (log_prob, old_log_prob, advantage, mask) as `tokens.py` describes them, and returns a `SurrogateOutput` of
[B, T], or [B, 1] where the ratio is one of the whole completion: `loss` to be minimised, `ratio`, and `clipped` (the
term has no gradient for its clip). On policy, with `old_log_prob = log_prob.detach()`, no clip is active and all of
them have the gradient of `-A l` (GSPO, LUSPO: that of the row's mean l).

Last the losses of whole groups, which are no product of advantage, weight and surrogate: Reg-GRPO, REAL, PACS. Their
score [B] is a row's log-ratio or log-probability with its gradient (`tokens.sequence_log_ratio`, `mean_log_ratio`),
group [B] integers. **Groups must be complete**: a micro-batch that holds half of one is another loss.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from genrl.objectives.policy_losses import SurrogateOutput, clipped_surrogate, importance_ratio, score_function_loss
from genrl.objectives.tokens import log_ratio, masked, mean_log_ratio, per_token, row_mean, sequence_log_ratio

Bound = Tensor | float


def clip_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    low: Bound = 0.2,
    high: Bound = 0.2,
    cap: float | None = None,
    dual: float | None = None,
    drop_above: float | None = None,
) -> SurrogateOutput:
    """`-min(rho A, clip(rho, 1 - low, 1 + high) A)` per token: GRPO (arXiv 2402.03300, eq. 3), with two widths as in
    DAPO (arXiv 2503.14476, eq. 10).

    low, high: numbers, or both tensors [B, 1] or [B, T] (a width per row: ETR).
    cap: rho is at most this also where the clip does not bind (A < 0): INTELLECT-2's two-sided clip, cap > 1 + high.
    dual: for A < 0 the objective is at least dual * A (dual clip; 3 in verl and EasyR1, 10 in DCPO).
    drop_above: rows with any rho above it keep the clipped branch only (VL-DAC's code: 10).
    """
    difference = log_ratio(log_prob, old_log_prob, mask)
    if cap is not None:
        if bool((torch.as_tensor(high) + 1.0 >= cap).any()):
            raise ValueError(f"cap must be above 1 + high, got cap {cap} and high {high}")
        # In the log, before the exponential can overflow.
        difference = difference.clamp(max=math.log(cap))
    return _clipped(difference, per_token(advantage, mask), low, high, dual=dual, drop_above=drop_above)


def log_clamp_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    delta: float = 1e3,
    low: float = 0.2,
    high: float = 0.2,
) -> SurrogateOutput:
    """`clip_surrogate` of `rho = exp(clip(l - l_old, -log delta, log delta))`, [B, T]: StableReinforce's ratio
    (arXiv 2505.02835).

    The ratio cannot overflow. Outside the clamp there is no gradient, also where PPO's minimum would keep one.
    """
    if delta <= 1:
        raise ValueError(f"delta bounds the ratio to [1 / delta, delta] and must be above 1, got {delta}")
    bound = math.log(delta)
    difference = log_ratio(log_prob, old_log_prob, mask).clamp(-bound, bound)
    return _clipped(difference, per_token(advantage, mask), low, high)


def dynamic_clip_bounds(
    old_log_prob: Tensor, *, low: float = 0.16, high: float = 0.2, maximum: float = 10.0
) -> tuple[Tensor, Tensor]:
    """DCPO's bounds of the ratio by the token's old probability q (arXiv 2509.02333): wide for rare tokens.

    `[1/2 + 1/2 sqrt(max(1 - 4 low / q, 0)), min(1/2 + 1/2 sqrt(1 + 4 high / q), maximum)]`, elementwise.
    """
    inverse = torch.exp(-old_log_prob.detach())
    lowest = 0.5 + 0.5 * (1.0 - 4.0 * low * inverse).clamp(min=0.0).sqrt()
    highest = (0.5 + 0.5 * (1.0 + 4.0 * high * inverse).sqrt()).clamp(max=maximum)
    return lowest, highest


def dynamic_clip_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    low: float = 0.16,
    high: float = 0.2,
    maximum: float = 10.0,
    dual: float = 10.0,
) -> SurrogateOutput:
    """PPO's clip at `dynamic_clip_bounds`, with a dual clip, [B, T]: DCPO. The scripts have widths of .2 and .28."""
    old = masked(old_log_prob.detach(), mask)
    lowest, highest = dynamic_clip_bounds(old, low=low, high=high, maximum=maximum)
    difference = log_ratio(log_prob, old_log_prob, mask)
    return _clipped(difference, per_token(advantage, mask), 1.0 - lowest, highest - 1.0, dual=dual)


def sequence_clip_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> SurrogateOutput:
    """PPO's clip of `s_b = exp(mean_t (l - l_old))`, one term [B, 1] per row: GSPO (arXiv 2507.18071, eq. 5).

    advantage [B]. With aggregation "seq_sum" it is LUSPO: each row times its length.
    """
    if advantage.dim() != 1:
        raise ValueError(f"one ratio per row needs one advantage per row [B], got {list(advantage.shape)}")
    return _clipped(mean_log_ratio(log_prob, old_log_prob, mask)[:, None], advantage[:, None], low, high)


def sequence_token_clip_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> SurrogateOutput:
    """PPO's clip of `sg(s_b) exp(l - sg l)` per token: GSPO-token (arXiv 2507.18071, eq. 13), for advantages [B, T]."""
    token_log_prob = masked(log_prob, mask)
    # The value is the row's ratio, the gradient the token's own: kept - kept.detach() is 0.
    row = mean_log_ratio(log_prob.detach(), old_log_prob, mask)[:, None]
    return _clipped(row + (token_log_prob - token_log_prob.detach()), per_token(advantage, mask), low, high)


def geometric_mean_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    low: float = 0.4,
    high: float = 0.4,
) -> SurrogateOutput:
    """`-A exp(mean_t k_t)`, k = min(d, high) where A > 0, max(d, -low) where A < 0, d = l - l_old: GMPO
    (arXiv 2507.20673), the geometric mean of a row's ratios, each clipped in the log domain on PPO's side.

    loss is [B, 1], one term per row; ratio and `clipped` are of its tokens, [B, T]. advantage [B].
    """
    if advantage.dim() != 1:
        raise ValueError(f"one geometric mean per row needs one advantage per row [B], got {list(advantage.shape)}")
    difference, weight = log_ratio(log_prob, old_log_prob, mask), advantage.detach()[:, None].to(log_prob.dtype)
    clipped_log_ratio = torch.where(weight > 0, difference.clamp(max=high), difference.clamp(min=-low))
    ratio = row_mean(clipped_log_ratio, mask)[:, None].exp()
    clipped = ((weight > 0) & (difference > high)) | ((weight < 0) & (difference < -low))
    return SurrogateOutput(-weight * ratio, difference.exp(), clipped)


def kl_cov_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    chosen: Tensor,
    *,
    beta: float = 1.0,
) -> SurrogateOutput:
    """`-rho A + beta |l - l_old|` where chosen [B, T], `-rho A` elsewhere: KL-Cov (arXiv 2505.22617).

    No clip. The paper writes a KL to the policy before the update; |l - l_old| is how the released code and verl
    estimate it. Its gradient is 0 on policy, so that it acts from the second update of a rollout on.
    """
    difference = log_ratio(log_prob, old_log_prob, mask)
    ratio = difference.exp()
    penalty = torch.where(chosen.bool() & mask.bool(), difference.abs(), 0.0)
    loss = -per_token(advantage.detach(), mask).to(ratio.dtype) * ratio + beta * penalty
    return SurrogateOutput(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def cispo_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    lowest: float = 0.0,
    highest: float = 5.0,
) -> SurrogateOutput:
    """`-sg(clip(rho, lowest, highest)) A l`: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4). No token loses its gradient.

    The bounds are of the ratio itself, as in TRL; verl and EasyR1 clamp to [1 - .2, 1 + .28] instead.
    `clipped` marks the ratios outside of the bounds.
    """
    ratio = log_ratio(log_prob, old_log_prob, mask).detach().exp()
    bounded = ratio.clamp(lowest, highest)
    loss = bounded * score_function_loss(masked(log_prob, mask), per_token(advantage, mask))
    return SurrogateOutput(loss, ratio, bounded != ratio)


def sapo_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    positive: float = 1.0,
    negative: float = 1.05,
) -> SurrogateOutput:
    """`-(4 / tau) sigmoid(tau (rho - 1)) A`, [B, T]: SAPO's soft gate (arXiv 2511.20347) instead of a clip.

    tau is `positive` where A > 0, else `negative`. The gate's derivative is 1 at rho = 1; nothing is ever clipped.
    """
    ratio = importance_ratio(log_ratio(log_prob, old_log_prob, mask), torch.zeros((), device=log_prob.device))
    weight = per_token(advantage.detach(), mask).to(ratio.dtype)
    tau = torch.where(weight > 0, torch.full_like(weight, positive), negative)
    loss = -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * weight
    return SurrogateOutput(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def reinforce_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor) -> SurrogateOutput:
    """`-A l` per token, [B, T], the policy gradient itself; `old_log_prob` is used for the reported ratio only."""
    ratio = log_ratio(log_prob, old_log_prob, mask).detach().exp()
    loss = score_function_loss(masked(log_prob, mask), per_token(advantage, mask))
    return SurrogateOutput(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def vespo_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> SurrogateOutput:
    """`-sg(phi(W)) A l`, `W = exp(sum_t (l - l_old))`, `phi = W^k exp(lambda (1 - W))`: VESPO's soft sequence weight.

    (k, lambda) is `positive` where A >= 0, else `negative`. phi(1) = 1, and it falls to 0 far off policy on both sides.
    advantage [B]; `ratio` is W, [B, 1].
    """
    if advantage.dim() != 1:
        raise ValueError(f"one weight per row needs one advantage per row [B], got {list(advantage.shape)}")
    log_weight = sequence_log_ratio(log_prob.detach(), old_log_prob, mask)[:, None]
    up = (advantage >= 0)[:, None]
    power = torch.where(up, torch.full_like(log_weight, positive[0]), negative[0])
    rate = torch.where(up, torch.full_like(log_weight, positive[1]), negative[1])
    # In the log: W^k alone overflows for a long answer, and inf times exp(-inf) is NaN.
    phi = torch.exp(rate + power * log_weight - rate * log_weight.exp())
    loss = phi * score_function_loss(masked(log_prob, mask), advantage[:, None])
    return SurrogateOutput(loss, log_weight.exp(), torch.zeros_like(phi, dtype=torch.bool))


def unsampled_loss(log_prob: Tensor, advantage: Tensor, *, shaping: float) -> Tensor:
    """`-A p / (p + shaping)` per token, [B, T], of answers that another policy, or the same under another prompt, gave:
    LUFFY (arXiv 2504.14945, eq. 6), ICPO (arXiv 2510.26519). Its gradient is largest for tokens as likely as `shaping`
    and vanishes for impossible ones, where that of a ratio would explode. advantage [B, 1] or [B, T]."""
    p = log_prob.exp()
    return -advantage.detach() * p / (p + shaping)


def _clipped(
    difference: Tensor,
    advantage: Tensor,
    low: Bound,
    high: Bound,
    *,
    dual: float | None = None,
    drop_above: float | None = None,
) -> SurrogateOutput:
    """PPO's clip of `exp(difference)`, with the dual clip and VL-DAC's rule."""
    # The shared clip takes two log-probabilities: the difference and 0 have the same ratio.
    plain = clipped_surrogate(difference, torch.zeros((), device=difference.device), advantage, low, high)
    loss, clipped = plain.loss, plain.clipped
    weight = advantage.detach().to(loss.dtype)
    if dual is not None:
        if dual <= 1:
            raise ValueError(
                f"the dual clip bounds the objective by dual * A for A < 0 and must be above 1, got {dual}"
            )
        limit = -dual * weight
        bounded = (weight < 0) & (loss > limit)
        loss, clipped = torch.where(bounded, limit, loss), clipped | bounded
    if drop_above is not None:
        outside = (plain.ratio.detach() < 1.0 - low) | (plain.ratio.detach() > 1.0 + high)
        dropped = (plain.ratio.detach() > drop_above).any(dim=1, keepdim=True)
        bounded_loss = -weight * torch.clamp(plain.ratio, 1.0 - low, 1.0 + high)  # type: ignore[arg-type]
        loss, clipped = torch.where(dropped, bounded_loss, loss), clipped | (dropped & outside)
    return SurrogateOutput(loss, plain.ratio, clipped)


def regression_loss(score: Tensor, advantage: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """`(A - z)^2`, [B]; z the z-score of `score` in its group: Reg-GRPO (DeepVideo-R1, arXiv 2506.07464, eqs. 7-8).

    score: `sequence_log_ratio`. z has sample std + eps; eps, which the paper does not give, is ours.
    On the first update after a rollout all scores are 0, so that z is 0 and its gradient 1 / eps: clip gradients, and
    take at least two updates per rollout.
    """
    index = torch.unique(group, return_inverse=True)[1]
    predicted = torch.zeros_like(score)
    for slot in range(int(index.max()) + 1):
        members = (index == slot).nonzero()[:, 0]
        if members.numel() > 1:
            chosen = score[members]
            # torch's std has gradient 0, not NaN, where all are equal
            predicted = predicted.index_put((members,), (chosen - chosen.mean()) / (chosen.std() + eps))
    return (advantage.detach().to(score.dtype) - predicted) ** 2


def classification_loss(score: Tensor, positive: Tensor, group: Tensor, *, tau: float = 0.5) -> Tensor:
    """`log(1 + sum_pos exp(-s / tau)) + log(1 + sum_neg exp(s / tau))` of each group, [P]: REAL.

    score: `mean_log_ratio`; positive: bool [B], correct rows (ms-swift: those of positive group advantage). The 1 is
    the anchor's logit 0. A group without both classes has 0, and counts in the mean.
    """
    if tau <= 0:
        raise ValueError(f"the temperature tau must be positive, got {tau}")
    index = torch.unique(group, return_inverse=True)[1]
    losses = []
    for slot in range(int(index.max()) + 1):
        members = index == slot
        good, bad = score[members & positive.bool()], score[members & ~positive.bool()]
        anchor = score.new_zeros(1)
        if len(good) and len(bad):
            parts = torch.cat([anchor, -good / tau]).logsumexp(0) + torch.cat([anchor, bad / tau]).logsumexp(0)
        else:
            # Not a plain 0: where no group has both classes, the loss must still have a graph to go back through.
            parts = 0.0 * score[members].sum()
        losses.append(parts)
    return torch.stack(losses)


def right_answer_loss(
    score: Tensor,
    right: Tensor,
    group: Tensor,
    *,
    compare: Literal["others", "group", "none"] = "others",
    balanced: bool = False,
) -> Tensor:
    """Cross-entropy of right [B] (bool) with a logit of each row, [B]: PACS (arXiv 2509.02522).

    score: `beta * sequence_log_ratio`. The logit is the score less the mean of the others of its group, its z-score
    (sample std + 1e-6), or itself. balanced: times n / (2 n_c), n_c the rows of the group that are as right.
    """
    index = torch.unique(group, return_inverse=True)[1]
    losses = torch.zeros_like(score)
    for slot in range(int(index.max()) + 1):
        members = (index == slot).nonzero()[:, 0]
        logit, target = score[members], right[members].to(score.dtype)
        number = len(members)
        if compare != "none" and number > 1:
            centred = logit - logit.mean()
            logit = centred * number / (number - 1) if compare == "others" else centred / (logit.std() + 1e-6)
        weight = None
        if balanced:
            same = torch.where(target > 0, target.sum(), number - target.sum())
            # A group of one class has nothing to balance; the formula would halve its loss.
            weight = number / (2.0 * same) if bool(0 < target.sum() < number) else torch.ones_like(target)
        row_losses = F.binary_cross_entropy_with_logits(logit, target, weight=weight, reduction="none")
        losses = losses.index_put((members,), row_losses)
    return losses


# Policy gradients for masked diffusion language models, whose log-probabilities are bounds: BGPO (arXiv 2510.11683).
#
# `elbo` [B, M]: M Monte-Carlo estimates (random masks) of the evidence lower bound of each completion;
# `old_elbo` the same masks under the weights before the update; advantage [B]. d_j = elbo_j - old_elbo_j.


def linear_bound_loss(elbo: Tensor, old_elbo: Tensor, advantage: Tensor) -> Tensor:
    """`-A mean_j (1 + d_j)` where A >= 0, `-A mean_j exp(d_j)` where A < 0: BGPO's bound (eqs. 9-14), [B].

    Never below the exact objective `-A exp(mean_j d_j)`, and equal in value and gradient on policy. It is a sum over j,
    so one mask at a time can be run forwards and backwards (divide by M): memory does not grow with M.
    """
    difference = elbo - old_elbo.detach()
    weight = advantage.detach().to(elbo.dtype)[:, None]
    return -(weight * torch.where(weight >= 0, 1.0 + difference, difference.exp())).mean(dim=1)
