"""Terms beside the policy loss of token policies: KL estimates, entropy, perception, value.

`policy_losses.kl_k2` and `kl_k3` are the other two estimates. Shapes and masks as in `tokens.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.objectives.surrogates.policy_losses import kl_k3
from genrl.objectives.tokens.tokens import row_sum, token_mean


def kl_k1(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """`l - l_ref`, elementwise: unbiased for KL(policy || reference), of either sign; its own gradient has mean 0.

    It is therefore subtracted from rewards (REINFORCE++, R1-Reward), not added to losses.
    """
    return log_prob - ref_log_prob.detach()


def kl_k3_clamped(
    log_prob: Tensor, ref_log_prob: Tensor, *, difference_limit: float = 20.0, limit: float = 10.0
) -> Tensor:
    """`min(kl_k3, limit)` of `d = clip(l_ref - l, -+difference_limit)`, elementwise: k3 (GRPO, eq. 4) of verl, EasyR1.

    No gradient outside of the limits.
    """
    difference = (ref_log_prob.detach() - log_prob).clamp(-difference_limit, difference_limit)
    return kl_k3(-difference, torch.zeros_like(difference)).clamp(max=limit)


def kl_categorical(log_rows: Tensor, ref_log_rows: Tensor) -> Tensor:
    """`sum_a pi (log pi - log pi_ref)` of whole log-softmax rows [..., V], exact: [...]. Gradient through `log_rows`.

    MusicRL's KL (arXiv 2402.04229); VPPO's dependency as its paper has it (policy with and without the picture).
    """
    return (log_rows.exp() * (log_rows - ref_log_rows.detach())).sum(dim=-1)


def sampled_entropy(log_prob: Tensor, mask: Tensor) -> Tensor:
    """`-mean l` over the tokens of the call, []: one sample's estimate of the entropy, with the gradient VPPO takes."""
    return token_mean(-log_prob, mask)


def entropy_band(entropy: Tensor, low: float, high: float) -> Tensor:
    """`max(0, H - high) + max(0, low - H)`, elementwise: no cost inside the band (OpenVLThinkerV2, SPINE).

    Raises ValueError for low > high.
    """
    if low > high:
        raise ValueError(f"an entropy band needs low <= high, got {low} and {high}")
    return (entropy - high).clamp(min=0.0) + (low - entropy).clamp(min=0.0)


def perception_loss(
    log_prob: Tensor,
    degraded_log_prob: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1e-4,
    eta: float = 1e-3,
    rows: int | None = None,
) -> Tensor:
    """`-gamma K - eta mean_b sum_t l`, []: Q-Hawkeye's perception loss. The answer must depend on the quality seen.

    K is the token mean of `kl_k3_clamped` against the same tokens read with a degraded picture (current policy, no
    gradient). The published third term, on the entropy with the degraded picture, has no gradient in the released code.
    Rows without a degraded twin have mask 0. rows: B of the whole step; see `tokens.aggregate`.
    """
    share = 1.0 if rows is None else len(mask) / rows
    divergence = token_mean(kl_k3_clamped(log_prob, degraded_log_prob), mask)
    return share * (-gamma * divergence - eta * row_sum(log_prob, mask).mean())


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, *, clip: float = 0.1) -> Tensor:
    """`max((V - R)^2, (V_old + clip(V - V_old, -+clip) - R)^2)`, elementwise: PPO's value loss; VL-DAC takes half."""
    old, target = old_value.detach(), returns.detach()
    near = old + (value - old).clamp(-clip, clip)
    return torch.maximum((value - target) ** 2, (near - target) ** 2)
