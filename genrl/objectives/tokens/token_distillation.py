"""Distances between the distributions of a student and a teacher at each token, by their log-softmax rows [..., V] or
the rows of some tokens and all the rest.

The other way to distil needs no rows: the gap `l_teacher - l` of the sampled token is an advantage (on-policy
distillation), whose policy gradient is that of the reverse KL.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genrl.objectives.surrogates.bounds import LEAST_INTERPOLATION as LEAST
from genrl.objectives.tokens.tokens import log_ratio, per_token


def gap_advantage(
    advantage: Tensor, log_prob: Tensor, teacher_log_prob: Tensor, mask: Tensor, *, coef: float = 1.0
) -> Tensor:
    """`A + coef (l_teacher - l)`, [B, T]: its policy gradient on policy is that of `-coef KL(student || teacher)`.
    advantage [B] or [B, T]; log-probabilities of the sampled tokens; without gradient."""
    gap = log_ratio(teacher_log_prob.detach(), log_prob, mask)
    return per_token(advantage.detach(), mask) + coef * gap.to(advantage.dtype)


def with_rest(log_rows: Tensor) -> Tensor:
    """Log-probabilities of some tokens [..., K], and of all others together: [..., K + 1]. At least 1e-7 is left for
    these, so that the logarithm is finite."""
    mass = log_rows.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    # log1p: where the named tokens hold nearly all, 1 - mass would be rounding.
    return torch.cat([log_rows, (-mass.exp()).log1p()], -1)


def generalised_divergence(log_p: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """GKD's distance of a student p from a teacher t (arXiv 2306.13649), [...]: `KL(t || p)` for beta 0, `KL(p || t)`
    for 1, else `beta KL(t || M) + (1 - beta) KL(p || M)` with `M = (1 - beta) p + beta t`. Gradient through log_p.

    Raises ValueError for a beta that is neither a KL nor well between them.
    """
    log_t = log_t.detach()
    if beta == 0:
        return _kl(log_t, log_p)
    if beta == 1:
        return _kl(log_p, log_t)
    if not LEAST <= beta <= 1 - LEAST:
        text = (
            f"between {LEAST} and {1 - LEAST}: nearer to 0 or 1 the distance vanishes, and is not the KL of the limit"
        )
        raise ValueError(f"beta must be 0, 1 or {text}; got {beta}")
    middle = torch.logaddexp(log_p + math.log(1 - beta), log_t + math.log(beta))
    return beta * _kl(log_t, middle) + (1 - beta) * _kl(log_p, middle)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b), [...]; what has no probability under a adds nothing."""
    a = log_a.exp()
    return torch.where(a > 0, a * (log_a - log_b), 0.0).sum(-1)
