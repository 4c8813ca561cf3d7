"""Factors of single tokens in the policy loss: which tokens teach, and how much; and trust regions by them.

Factors have no gradient, and none is negative: [B, T], or [B, 1] for one factor per row. Several are multiplied. **The
divisor of the aggregation does not change** where a weight is 0 (TRL, VPPO and 80/20 all keep the full token count):
keeping a fifth of the tokens also scales the gradient. Batch statistics are over all rows given: give the whole
rollout batch.

Trust regions without a clip of the ratio: DPPO, CPPO, DRPO by how far a probability has moved, HAPO by the entropy of
its distribution, Lp-Reg by how rare the token is. Arguments and results as in `token_surrogates`. D = |p - p_old| of
the sampled token: a rare token may change its ratio much, and a common one little, for the same D.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from genrl.objectives.policy_losses import SurrogateOutput, gated_surrogate
from genrl.objectives.token_regularisers import kl_k3_clamped
from genrl.objectives.tokens import log_ratio, masked, per_token, row_mean, token_count

MismatchLevel = Literal["token", "sequence", "sequence_geo"]
MismatchMode = Literal["truncate", "mask"]


def top_entropy(entropy: Tensor, mask: Tensor, *, share: float = 0.2) -> Tensor:
    """1 where the entropy reaches the (1 - share) quantile over all valid tokens of the batch, else 0: [B, T].

    "80/20", forking tokens (arXiv 2506.01939). The quantile interpolates linearly.
    """
    valid = mask.bool()
    if not bool(valid.any()):
        return torch.zeros_like(entropy)
    # torch.quantile refuses more than 2^24 numbers: interpolate on the sorted ones ourselves
    chosen = entropy.detach()[valid].double().sort().values
    position = (1.0 - share) * (len(chosen) - 1)
    below = min(int(position), len(chosen) - 1)
    above = min(below + 1, len(chosen) - 1)
    threshold = torch.lerp(chosen[below], chosen[above], position - below)
    return (valid & (entropy.double() >= threshold)).to(entropy)


def top_of_row(scores: Tensor, mask: Tensor, *, share: float = 0.4) -> Tensor:
    """1 at the ceil(share n_b) highest scores among each row's tokens, else 0: [B, T]. The first of equals wins.

    VPPO's mask by visual dependency (.4), SPINE's by entropy (.2).
    """
    valid = mask.bool()
    keyed = torch.where(valid, scores.detach().double(), -torch.inf)
    # The second sort turns an order into ranks.
    rank = keyed.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    # what rounding adds to an exact product must not make one token more of it
    count = (share * token_count(mask).double() - 1e-9).ceil()
    return (valid & (rank < count[:, None])).to(scores)


def visual_dependency(old_log_prob: Tensor, masked_image_log_prob: Tensor, mask: Tensor) -> Tensor:
    """How much each token depends on the picture, [B, T] in [0, 10]: VPPO, from one forward with a destroyed picture.

    `exp(d) - d - 1`, d = l' - l_old (`kl_k3_clamped`), as in the released code. The paper has the KL of the whole
    distributions, `token_regularisers.kl_categorical`.
    """
    old, other = masked(old_log_prob.detach(), mask), masked(masked_image_log_prob.detach(), mask)
    return kl_k3_clamped(old, other)


def group_divergence(log_rows: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """How much the rows of a group disagree on the next token at each position, [P, T]: TW-GRPO.

    `mean_i sum_v (exp(d) - d - 1)`, d = clip(M - l_i, -+11), M the mean over the group of the log-softmax rows l_i (not
    normalised again). As in the released code, the sum over v is no expectation. log_rows [B, T, V]; a masked position
    counts as the uniform distribution. Positions are independent: call it for some of them at a time, and never keep
    [B, T, V]. Groups in the order of their sorted numbers.
    """
    vocabulary = log_rows.shape[-1]
    uniform = -torch.log(torch.tensor(float(vocabulary), dtype=log_rows.dtype, device=log_rows.device))
    rows = torch.where(mask.bool()[..., None], log_rows.detach(), uniform)
    index = torch.unique(group, return_inverse=True)[1].to(rows.device)
    divergences = []
    for slot in range(int(index.max()) + 1):
        members = rows[index == slot]
        difference = (members.mean(dim=0, keepdim=True) - members).clamp(-11.0, 11.0)
        divergences.append((difference.expm1() - difference).sum(dim=-1).mean(dim=0))
    return torch.stack(divergences)


def divergence_weights(divergence: Tensor, mask: Tensor, group: Tensor, *, alpha: float = 1.7) -> Tensor:
    """`1 + (alpha - 1) n` where valid, n the min-max normalised divergence over a group's positions: TW-GRPO, [B, T].

    The same for all rows of a group; in [1, alpha]. divergence [P, T] from `group_divergence`. A position where no row
    of the group has a token has divergence 0 and counts in the minimum, as in the released code: for a group that is
    shorter than the batch, weight 1 stands for full agreement.
    """
    lowest, highest = divergence.amin(dim=1, keepdim=True), divergence.amax(dim=1, keepdim=True)
    weights = 1.0 + (alpha - 1.0) * (divergence - lowest) / (highest - lowest + 1e-8)
    index = torch.unique(group, return_inverse=True)[1].to(divergence.device)
    return masked(weights[index], mask)


def mismatch_weights(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    level: MismatchLevel = "sequence",
    mode: MismatchMode = "mask",
    low: float = 0.0,
    high: float = 3.0,
) -> Tensor:
    """`w = exp(l_old - l_sampler)`: corrects for the engine that sampled (other kernels or precision, older weights).

    level: "token" [B, T] (1 where masked); "sequence" the product over the row [B, 1]; "sequence_geo" its
    length-normalised form. mode: "truncate" clamps w to [low, high], "mask" sets it to 0 outside. TRL's default is
    sequence, mask, high 3; decoupled PPO (AReaL, PARA-GRPO) is token, mask, high 5; IcePop (Ring-1T) is token, mask,
    low 0.5, high 5: w inside of [low, high], 0 outside, on both sides.
    It multiplies the policy term, not the KL.
    """
    difference = log_ratio(old_log_prob.detach(), sampler_log_prob, mask)
    if level == "token":
        weights = difference.exp()
    elif level == "sequence":
        weights = difference.sum(dim=1, keepdim=True).exp()
    elif level == "sequence_geo":
        weights = row_mean(difference, mask)[:, None].exp()
    else:
        raise ValueError(f"level must be 'token', 'sequence' or 'sequence_geo', got {level!r}")
    if mode == "truncate":
        weights = weights.clamp(low, high)
    elif mode == "mask":
        weights = torch.where((weights >= low) & (weights <= high), weights, torch.zeros_like(weights))
    else:
        raise ValueError(f"mode must be 'truncate' or 'mask', got {mode!r}")
    return weights


def off_policy_mask(
    log_prob: Tensor, sampler_log_prob: Tensor, advantage: Tensor, mask: Tensor, *, threshold: float
) -> Tensor:
    """0 for rows with A < 0 that the policy has moved away from, `mean_t (l_sampler - l) > threshold`, else 1: [B, 1].

    DeepSeek-V3.2's off-policy sequence mask, as in TRL. Each update computes it again from its *current* log_prob.
    advantage [B].
    """
    drift = -row_mean(log_ratio(log_prob.detach(), sampler_log_prob, mask), mask)
    return (~((advantage < 0) & (drift > threshold))).to(log_prob)[:, None]


# Which tokens drive the entropy down, by their covariance of log-probability and advantage: Clip-Cov and KL-Cov.
#
# Both choose tokens of the **whole rollout batch**, without gradient, by the log-probabilities before the update, so
# that the choice depends on no split into updates and micro-batches. On the first update these are the current ones, as
# the paper has it; the released code and verl choose anew in every micro-batch.


def token_covariance(old_log_prob: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """`(l - mean l) (A - mean A)`, means over the tokens of the batch, float64 [B, T]; 0 where masked
    (arXiv 2505.22617). advantage [B] or [B, T]."""
    valid, count = mask.bool(), mask.bool().sum().clamp(min=1)
    centred = []
    for values in (old_log_prob, per_token(advantage, mask).expand(mask.shape)):
        token_values = masked(values.detach().double(), mask)
        centred.append(token_values - token_values.sum() / count)
    return torch.where(valid, centred[0] * centred[1], 0.0)


def clip_cov_weight(
    covariance: Tensor, draw: Tensor, mask: Tensor, *, share: float = 2e-4, low: float = 1.0, high: float = 5.0
) -> Tensor:
    """0 for `max(1, floor(share N))` tokens whose covariance lies in (low, high), 1 for the others, [B, T]: Clip-Cov
    (arXiv 2505.22617), which takes their gradient away.

    draw [B, T]: independent uniform numbers; the tokens with the smallest ones are taken. N: tokens of the batch. The 1
    is the released code's; the paper rounds down to 0.
    """
    inside = mask.bool() & (covariance > low) & (covariance < high)
    count = max(1, int(share * int(mask.bool().sum())))
    return 1.0 - _first(torch.where(inside, -draw.double(), -torch.inf), count)


def kl_cov_tokens(covariance: Tensor, mask: Tensor, *, share: float = 2e-3) -> Tensor:
    """1 for the `max(1, floor(share N))` tokens of the largest covariance, else 0, [B, T]: KL-Cov
    (arXiv 2505.22617)."""
    count = max(1, int(share * int(mask.bool().sum())))
    return _first(torch.where(mask.bool(), covariance, -torch.inf), count)


def _first(keys: Tensor, count: int) -> Tensor:
    """1 at the `count` largest finite keys."""
    flat = keys.flatten()
    best = flat.topk(min(count, int(flat.isfinite().sum()))).indices
    return torch.zeros_like(flat).index_fill(0, best, 1.0).view(keys.shape)


FARTHEST = 20.0
"""Largest log-ratio of a token, either way."""


def _moved(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(ratio with gradient, old probability, D without gradient), [B, T]; 1, 1 and 0 where masked."""
    # As verl clamps it: one token of e^80 would be all of the gradient, and nothing clips it here.
    ratio = log_ratio(log_prob, old_log_prob, mask).clamp(-FARTHEST, FARTHEST).exp()
    old = masked(old_log_prob.detach(), mask).exp()
    return ratio, old, (masked(log_prob.detach(), mask).exp() - old).abs()


def probability_mask_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, *, delta: float = 0.15
) -> SurrogateOutput:
    """`-A rho` where `A (rho - 1) <= 0 or D <= delta`, else 0: DPPO of tokens, with total variation by the sampled one.
    `clipped` marks the others."""
    ratio, _, distance = _moved(log_prob, old_log_prob, mask)
    return gated_surrogate(ratio, per_token(advantage.detach(), mask).to(ratio.dtype), distance > delta)


def cumulative_mask_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    delta: float = 0.2,
    last: float = 0.8,
    slack: float = 0.02,
) -> SurrogateOutput:
    """`-A rho` where `A (rho - 1) <= 0 or w D <= c`, else 0: CPPO. The budget c of a token shrinks by what those before
    it have moved.

    With w falling from 1 to `last` along a row of n tokens, S and W the sums of w D and w before the token, and b the
    row's .9 quantile of D, in [slack, 2 slack]: `c = min(delta, delta + b W - S)`.
    """
    ratio, _, distance = _moved(log_prob, old_log_prob, mask)
    valid = mask.bool()
    place = (valid.cumsum(1) - 1).to(distance.dtype)
    count = valid.sum(1, keepdim=True)
    weight = masked(1.0 - (1.0 - last) * place / (count - 1).clamp(min=1), mask)
    far = weight * distance
    # the masked count as no number, so that the quantile is of the row's tokens; a row without any has none to mask
    tail = torch.where(valid, distance, torch.nan).nanquantile(0.9, dim=1, keepdim=True)
    rate = tail.nan_to_num(nan=0.0).clamp(slack, 2.0 * slack)
    before = rate * (weight.cumsum(1) - weight) - (far.cumsum(1) - far)
    return gated_surrogate(
        ratio, per_token(advantage.detach(), mask).to(ratio.dtype), far > (delta + before).clamp(max=delta)
    )


def quadratic_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, *, width: float = 12.5
) -> SurrogateOutput:
    """`-A rho + |A| p_old (rho - 1)^2 / (2 width)`: DRPO (arXiv 2606.09821), smooth, and 0 in gradient where
    `D = width` has been reached in the direction of A. Nothing is clipped."""
    ratio, old, _ = _moved(log_prob, old_log_prob, mask)
    weight = per_token(advantage.detach(), mask).to(ratio.dtype)
    loss = -weight * ratio + weight.abs() * old * (ratio - 1.0) ** 2 / (2.0 * width)
    return SurrogateOutput(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def lowest_share(values: Tensor, among: Tensor, *, share: float) -> Tensor:
    """The floor(share n), one at least, of the n tokens of `among` bool [B, T] with the lowest values [B, T], bool;
    none where n is 1."""
    chosen = torch.zeros_like(among)
    number = int(among.sum())
    if number > 1:
        last = values.detach()[among].sort().values[max(1, int(share * number)) - 1]
        chosen = among & (values.detach() <= last)
    return chosen


def min_p_log_prob(logits: Tensor, tokens: Tensor, *, kappa: float = 0.02) -> Tensor:
    """Log-probability [...] of tokens [...] among those of at least kappa times the largest probability, renormalised;
    -inf for the others. logits [..., V]."""
    log_p = logits.log_softmax(-1)
    floor = log_p.amax(-1, keepdim=True) + torch.log(torch.tensor(kappa, dtype=log_p.dtype))
    allowed = torch.where(log_p < floor, -torch.inf, log_p)
    return allowed.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def low_probability_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    proxy: Tensor,
    chosen: Tensor,
    *,
    beta: float = 1.0,
    low: float = 1.0,
    high: float = 9.0,
) -> SurrogateOutput:
    """PPO's clip at [1 - low, 1 + high]; of the `chosen` bool [B, T] that are less likely than by `proxy` [B, T],
    `-A rho + beta k` instead, unclipped, k the estimate k3 of the KL from the proxy, in [-10, 10]: Lp-Reg
    (arXiv 2510.03222). So rare but sensible tokens of wrong answers are not pressed to nothing."""
    ratio = log_ratio(log_prob, old_log_prob, mask).clamp(-FARTHEST, FARTHEST).exp()
    weight = per_token(advantage.detach(), mask).to(ratio.dtype)
    bounded = ratio.clamp(1.0 - low, 1.0 + high)
    clipped = -weight * bounded > -weight * ratio
    now, rare = masked(log_prob, mask), masked(proxy.detach().to(log_prob.dtype), mask)
    held = chosen.bool() & mask.bool() & (now.detach() < rare)
    apart = torch.where(held, rare - now, 0.0)
    loss = torch.where(
        held,
        -weight * ratio + beta * (apart.exp() - apart - 1.0).clamp(-10.0, 10.0),
        torch.maximum(-weight * ratio, -weight * bounded),
    )
    return SurrogateOutput(loss, ratio, clipped & ~held)


def relative_entropy(entropy: Tensor, mask: Tensor, *, share: float = 0.8) -> Tensor:
    """h in [-1, 1], [B, T]: log-entropies less their `share` quantile over all tokens, over their root mean square,
    then over the largest of either sign: HAPO. 0 where masked."""
    valid = mask.bool()
    if not bool(valid.any()):
        return torch.zeros_like(entropy)
    log_entropy = entropy.detach()[valid].double().clamp(min=1e-12).log()
    ordered = log_entropy.sort().values  # torch.quantile refuses more than 2^24 numbers
    position = share * (len(ordered) - 1)
    below = min(int(position), len(ordered) - 1)
    quantile = torch.lerp(ordered[below], ordered[min(below + 1, len(ordered) - 1)], position - below)
    log_entropy = log_entropy - quantile
    log_entropy = log_entropy / log_entropy.square().mean().sqrt().clamp(min=1e-12)
    up, down = log_entropy.clamp(min=0).max().clamp(min=1e-12), (-log_entropy).clamp(min=0).max().clamp(min=1e-12)
    scaled = torch.where(log_entropy > 0, log_entropy / up, log_entropy / down)
    return torch.zeros_like(entropy).masked_scatter(valid, scaled.to(entropy.dtype))


def entropy_adaptive(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, height: Tensor, *, width: float = 0.2
) -> tuple[Tensor, Tensor, Tensor]:
    """(low, high, advantage), [B, T], of HAPO by h (`relative_entropy`): sure tokens may fall further, unsure ones may
    rise further; `A (1 + h)` for unsure tokens outside of half the range, and for sure ones inside of it."""
    low = torch.where(height <= 0, width * (1.0 - height), width)
    high = torch.where(height > 0, width * (1.0 + height), width)
    ratio = log_ratio(log_prob.detach(), old_log_prob, mask).exp()
    outside = (ratio < 1.0 - low / 2.0) | (ratio > 1.0 + high / 2.0)
    changed = ((height > 0) & outside) | ((height < 0) & ~outside)
    weight = per_token(advantage.detach(), mask).to(height.dtype).expand(mask.shape)
    return low, high, torch.where(changed, weight * (1.0 + height), weight)
