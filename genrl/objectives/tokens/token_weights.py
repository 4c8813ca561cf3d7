"""Factors of single tokens in the policy loss: which tokens teach, and how much. None has a gradient, none is negative.

[B, T], or [B, 1] for one factor per row. Several are multiplied. **The divisor of the aggregation does not change**
where a weight is 0 (TRL, VPPO and 80/20 all keep the full token count): keeping a fifth of the tokens also scales the
gradient. Batch statistics are over all rows given: give the whole rollout batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from genrl.objectives.tokens.token_regularisers import kl_k3_clamped
from genrl.objectives.tokens.tokens import log_ratio, masked, per_token, row_mean, token_count

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
