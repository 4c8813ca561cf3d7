"""Token sequences: masks, means over tokens, log-ratios, and the loss of a step. What all `token_*` modules share.

Conventions of these modules. B rows (completions), T padded length; per-token tensors are [B, T], per-row ones [B].
`mask` [B, T] (bool, or 0 and 1) marks the tokens that the policy chose: the completion with its end token, without
observations, tool output and padding. **Where it is 0, the other tensors may hold anything, NaN too**: nothing of it
reaches a value or a gradient. `log_prob` is the only tensor with a gradient; `old_log_prob` is of the weights that the
update starts from, `sampler_log_prob` what the generation engine reports, `ref_log_prob` of the reference. Advantages
are [B] (one per row) or [B, T]. Nothing here rounds: the result has the dtype of `log_prob`, which is float32 or more.

`aggregate` decides how much a token of a long completion counts beside one of a short. A step may be computed in
micro-batches: with `rows` and `tokens` of the *whole* step (all micro-batches and processes) the step's loss is the
**sum** of the micro-batches' losses. "seq_mean", "token_mean_global", "const" and "seq_sum" are then the same for any
split; "token_mean" is a mean over the tokens of a call, and changes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """values [B, T] with 0 where the mask is 0, whatever stood there (NaN and infinity included; no gradient to it)."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def token_count(mask: Tensor) -> Tensor:
    """n_b: tokens of each row, int64 [B]."""
    return mask.bool().sum(dim=1)


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens of each row, [B]."""
    return masked(values, mask).sum(dim=1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of each row, [B]; 0 for a row without any."""
    return row_sum(values, mask) / token_count(mask).clamp(min=1)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all tokens of the call, []; 0 where there is none."""
    return masked(values, mask).sum() / mask.bool().sum().clamp(min=1)


def quantiles(values: Tensor, shares: Sequence[float]) -> Tensor:
    """Quantiles [S] of values [N], linear between neighbours as torch's own, which takes 2^24 values at most; 0 where
    there is none."""
    if not len(values):
        return values.new_zeros(len(shares))
    ordered, place = values.sort().values, values.new_tensor(shares) * (len(values) - 1)
    return ordered[place.floor().long()].lerp(ordered[place.ceil().long()], place.frac())


def per_token(values: Tensor, mask: Tensor) -> Tensor:
    """What tokens are multiplied with: [B] becomes [B, 1], which stays; of [B, T] the masked are set to 0.

    Raises ValueError for another shape.
    """
    if values.dim() == 1 and len(values) == len(mask):
        return values[:, None]
    if values.shape == (len(mask), 1):
        return values
    if values.shape == mask.shape:
        return masked(values, mask)
    raise ValueError(f"one value per row or per token of {list(mask.shape)} is needed, got {list(values.shape)}")


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """`l - l_old`, [B, T]; 0 where masked. Gradient through `log_prob` only."""
    return masked(log_prob, mask) - masked(old_log_prob.detach(), mask)


def sequence_log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """`sum_t (l - l_old)`: the log-ratio of whole completions, [B]."""
    return log_ratio(log_prob, old_log_prob, mask).sum(dim=1)


def mean_log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """`sum_t (l - l_old) / n_b`, [B]: its exp is GSPO's length-normalised ratio s_b (arXiv 2507.18071, eq. 7)."""
    return sequence_log_ratio(log_prob, old_log_prob, mask) / token_count(mask).clamp(min=1)


Aggregation = Literal["seq_mean", "token_mean", "token_mean_global", "const", "seq_sum"]


def aggregate(
    term: Tensor,
    mask: Tensor,
    rule: Aggregation,
    *,
    rows: int | None = None,
    tokens: int | None = None,
    length: int | None = None,
) -> Tensor:
    """The loss [] of terms [B, T], or [B, 1] for one term per row, which then stands for each of its tokens.

    rows: B of the whole step, tokens: its valid tokens N; without them, those of this call.

        seq_mean            1/B sum_b (sum_t term / n_b)     GRPO (arXiv 2402.03300), GSPO, SAPO
        token_mean          sum term / tokens of the call    BNPO, TW-GRPO, VPPO's code; times (rows of the call) / B
        token_mean_global   sum term / N                     DAPO (arXiv 2503.14476, eq. 8, eq. 12), CISPO, DCPO's code
        const               sum term / (B length)            Dr. GRPO (arXiv 2503.20783): length = longest allowed
        seq_sum             1/B sum_b sum_t term             LUSPO (with GSPO's term), verl's seq-mean-token-sum

    Rows without tokens give 0 and count in B.
    Raises ValueError for an unknown rule and for what a rule lacks.
    """
    terms = term.expand(mask.shape)
    total = len(mask) if rows is None else rows
    if rule == "seq_mean":
        return row_mean(terms, mask).sum() / total
    if rule == "token_mean":
        return token_mean(terms, mask) * (len(mask) / total)
    if rule == "token_mean_global":
        count = int(mask.bool().sum()) if tokens is None else tokens
        return masked(terms, mask).sum() / max(count, 1)
    if rule == "const":
        if length is None or length < 1:
            raise ValueError(f"aggregation 'const' divides by the longest allowed completion: got length {length}")
        return masked(terms, mask).sum() / (total * length)
    if rule == "seq_sum":
        return row_sum(terms, mask).sum() / total
    raise ValueError(f"unknown aggregation {rule!r}; known: {', '.join(get_args(Aggregation))}")
