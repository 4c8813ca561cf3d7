"""Contrastive losses of embeddings."""

from __future__ import annotations

import torch
from torch import Tensor


def supervised_contrastive(embedding: Tensor, label: Tensor, temperature: float) -> Tensor:
    """Mean over anchors of `-mean_p log softmax(e_i e_p / t)`, p the others of its class: [] (arXiv 2004.11362, eq. 2).

    embedding [B, E] of length 1, label int64 [B]. Anchors without another of their class do not count; 0 if none does.
    """
    alike = embedding @ embedding.T / temperature
    itself = torch.eye(len(label), dtype=torch.bool, device=label.device)
    log_share = alike - alike.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    same = (label[:, None] == label[None]) & ~itself
    anchors = same.any(1)
    each = -(log_share.masked_fill(~same, 0.0)).sum(1) / same.sum(1).clamp(min=1)
    return each[anchors].sum() / anchors.sum().clamp(min=1)
