"""Which tokens drive the entropy down, by their covariance of log-probability and advantage: Clip-Cov and KL-Cov.

Both choose tokens of the **whole rollout batch**, without gradient, by the log-probabilities before the update, so that
the choice depends on no split into updates and micro-batches. On the first update these are the current ones, as the
paper has it; the released code and verl choose anew in every micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.objectives.tokens.tokens import masked, per_token


def token_covariance(old_log_prob: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """`(l - mean l) (A - mean A)`, means over the tokens of the batch, float64 [B, T]; 0 where masked
    (arXiv 2505.22617). advantage [B] or [B, T]."""
    kept, count = mask.bool(), mask.bool().sum().clamp(min=1)
    centred = []
    for values in (old_log_prob, per_token(advantage, mask).expand(mask.shape)):
        own = masked(values.detach().double(), mask)
        centred.append(own - own.sum() / count)
    return torch.where(kept, centred[0] * centred[1], 0.0)


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
