"""From per-token loss terms to one number: the aggregation rules of the GRPO family.

They decide how much a token of a long completion counts beside one of a short. A step may be computed in micro-batches:
with `rows` and `tokens` of the *whole* step (all micro-batches and processes) the step's loss is the **sum** of the
micro-batches' losses. "seq_mean", "token_mean_global", "const", "seq_sum" and "otm" are then the same for any split;
"token_mean" is a mean over the tokens of a call, and changes with it.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from genrl.objectives.tokens.tokens import masked, row_mean, row_sum, token_mean

Aggregation = Literal["seq_mean", "token_mean", "token_mean_global", "const", "seq_sum", "otm"]


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
        token_mean_global   sum term / N                     DAPO (arXiv 2503.14476, eq. 8, eq. 12), CISPO
        const               sum term / (B length)            Dr. GRPO (arXiv 2503.20783): length = longest allowed
        seq_sum             1/B sum_b sum_t term             LUSPO (with GSPO's term), verl's seq-mean-token-sum
        otm                 sum_b (sum_t term / n_b)         DCPO (arXiv 2509.02333): not divided by B

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
    if rule == "otm":
        return row_mean(terms, mask).sum()
    raise ValueError(f"unknown aggregation {rule!r}; known: {', '.join(get_args(Aggregation))}")
