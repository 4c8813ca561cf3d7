"""Actions that are chosen among K tokens each: log-probabilities, draws, entropy. Logits are [..., K]."""

from __future__ import annotations

import torch
from torch import Tensor


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """`log_softmax(logits / temperature)`, float32 whatever the logits are, [..., K]."""
    return torch.log_softmax(logits.float() / temperature, -1)


def draw(log_prob: Tensor, noise: Tensor) -> Tensor:
    """One of the K tokens for each row, int64 [...]: where its cumulative probability reaches Phi(noise).

    log_prob [..., K] is normalised, noise standard normal [...]: it alone decides, so that a draw can be made again.
    """
    cumulative = log_prob.double().exp().cumsum(-1)
    share = torch.special.ndtr(noise.double()).clamp(min=torch.finfo(torch.float64).tiny)  # 0 is of no token
    return torch.searchsorted(cumulative, share[..., None] * cumulative[..., -1:])[..., 0]


def chosen(log_prob: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [...] of the tokens int64 [...], out of [..., K]."""
    return log_prob.gather(-1, tokens[..., None])[..., 0]


def entropy(log_prob: Tensor) -> Tensor:
    """`-sum p ln p` in nats, [...]."""
    return -(log_prob.exp() * log_prob).sum(-1)
