"""MusicRL (arXiv 2402.04229): reinforcement learning of autoregressive audio tokens from one reward at the end.

Its preference reward model is Bradley-Terry (`genrl.vlm.methods.music_preference`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from genrl.objectives.tokens.token_regularisers import kl_categorical
from genrl.objectives.tokens.tokens import row_sum, token_mean


class MusicRLOutput(NamedTuple):
    """loss [] for the policy; policy and kl [], its two parts before their weights; value_loss [] for the baseline."""

    loss: Tensor
    policy: Tensor
    kl: Tensor
    value_loss: Tensor


def music_rl_loss(
    log_rows: Tensor,
    ref_log_rows: Tensor,
    tokens: Tensor,
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    alpha: float = 0.05,
) -> MusicRLOutput:
    """`-(1 - alpha) sum_t l_t (R - V_t) + alpha sum_t KL(pi || pi_0)`, mean over sequences: its objective, negated.

    log_rows, ref_log_rows log-softmax [B, T, V]; tokens int64 [B, T]; reward [B] of the finished piece, the return at
    every step; value [B, T]. The KL is over the whole vocabulary; the paper prints its last term without the factor pi,
    which we read as this. value_loss is the mean square of R - V. alpha is not in the paper's main text.
    Gradient: the loss through log_rows only, value_loss through value only.
    """
    log_prob = log_rows.gather(-1, tokens[..., None])[..., 0]
    advantage = reward.detach()[:, None] - value
    policy = row_sum(log_prob * advantage.detach(), mask).mean()
    kl = row_sum(kl_categorical(log_rows, ref_log_rows), mask).mean()
    return MusicRLOutput(-(1.0 - alpha) * policy + alpha * kl, policy, kl, token_mean(advantage**2, mask))
