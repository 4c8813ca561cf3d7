"""Token policies: exact objectives behind our bounds, and what single peers compute."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def exact_loss(elbo: Tensor, old_elbo: Tensor, advantage: Tensor) -> Tensor:
    """`-A exp(mean_j d_j)`, [B]: the objective that `masked_diffusion.linear_bound_loss` bounds (BGPO)."""
    return -advantage.detach().to(elbo.dtype) * (elbo - old_elbo.detach()).mean(dim=1).exp()


def masked_token_log_prob(
    logits: Tensor, labels: Tensor, *, first: int, reduction: Literal["sum", "mean"], ignore: int = -100
) -> Tensor:
    """Log-probability of the labelled tokens at positions >= first of each sequence, [B], in masked-token image models.

    logits [B, L, V] at the very positions of labels [B, L] (nothing is shifted: such models predict in place); label
    `ignore` = not counted. "mean" over the counted tokens.
    """
    kept = labels[:, first:] != ignore
    log_probs = logits[:, first:].log_softmax(dim=-1).gather(-1, labels[:, first:].clamp(min=0)[..., None])[..., 0]
    total = torch.where(kept, log_probs, 0.0).sum(dim=1)
    return total if reduction == "sum" else total / kept.sum(dim=1)
