"""Losses of whole groups, which are no product of advantage, weight and surrogate: Reg-GRPO, REAL, PACS.

score [B] is a row's log-ratio or log-probability with its gradient (`tokens.sequence_log_ratio`, `mean_log_ratio`),
group [B] integers. **Groups must be complete**: a micro-batch that holds half of one is another loss.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def regression_loss(score: Tensor, advantage: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """`(A - z)^2`, [B]; z the z-score of `score` in its group: Reg-GRPO (DeepVideo-R1, arXiv 2506.07464, eqs. 7-8).

    score: `sequence_log_ratio`. z has sample std + eps; eps, which the paper does not give, is ours.
    On the first update after a rollout all scores are 0, so that z is 0 and its gradient 1 / eps: clip gradients, and
    take at least two updates per rollout.
    """
    index = torch.unique(group, return_inverse=True)[1]
    predicted = torch.zeros_like(score)
    for slot in range(int(index.max()) + 1):
        members = (index == slot).nonzero()[:, 0]
        if members.numel() > 1:
            chosen = score[members]
            # torch's std has gradient 0, not NaN, where all are equal
            predicted = predicted.index_put((members,), (chosen - chosen.mean()) / (chosen.std() + eps))
    return (advantage.detach().to(score.dtype) - predicted) ** 2


def classification_loss(score: Tensor, positive: Tensor, group: Tensor, *, tau: float = 0.5) -> Tensor:
    """`log(1 + sum_pos exp(-s / tau)) + log(1 + sum_neg exp(s / tau))` of each group, [P]: REAL.

    score: `mean_log_ratio`; positive: bool [B], correct rows (ms-swift: those of positive group advantage). The 1 is
    the anchor's logit 0. A group without both classes has 0, and counts in the mean.
    """
    if tau <= 0:
        raise ValueError(f"the temperature tau must be positive, got {tau}")
    index = torch.unique(group, return_inverse=True)[1]
    losses = []
    for slot in range(int(index.max()) + 1):
        members = index == slot
        good, bad = score[members & positive.bool()], score[members & ~positive.bool()]
        anchor = score.new_zeros(1)
        if len(good) and len(bad):
            parts = torch.cat([anchor, -good / tau]).logsumexp(0) + torch.cat([anchor, bad / tau]).logsumexp(0)
        else:
            parts = 0.0 * score[members].sum()
        losses.append(parts)
    return torch.stack(losses)


def right_answer_loss(
    score: Tensor,
    right: Tensor,
    group: Tensor,
    *,
    compare: Literal["others", "group", "none"] = "others",
    balanced: bool = False,
) -> Tensor:
    """Cross-entropy of right [B] (bool) with a logit of each row, [B]: PACS (arXiv 2509.02522).

    score: `beta * sequence_log_ratio`. The logit is the score less the mean of the others of its group, its z-score
    (sample std + 1e-6), or itself. balanced: times n / (2 n_c), n_c the rows of the group that are as right.
    """
    index = torch.unique(group, return_inverse=True)[1]
    losses = torch.zeros_like(score)
    for slot in range(int(index.max()) + 1):
        members = (index == slot).nonzero()[:, 0]
        logit, target = score[members], right[members].to(score.dtype)
        number = len(members)
        if compare != "none" and number > 1:
            centred = logit - logit.mean()
            logit = centred * number / (number - 1) if compare == "others" else centred / (logit.std() + 1e-6)
        weight = None
        if balanced:
            same = torch.where(target > 0, target.sum(), number - target.sum())
            weight = number / (2.0 * same) if bool(0 < target.sum() < number) else torch.ones_like(target)
        row_losses = F.binary_cross_entropy_with_logits(logit, target, weight=weight, reduction="none")
        losses = losses.index_put((members,), row_losses)
    return losses


# Policy gradients for masked diffusion language models, whose log-probabilities are bounds: BGPO (arXiv 2510.11683).
#
# `elbo` [B, M]: M Monte-Carlo estimates (random masks) of the evidence lower bound of each completion;
# `old_elbo` the same masks under the weights before the update; advantage [B]. d_j = elbo_j - old_elbo_j.


def linear_bound_loss(elbo: Tensor, old_elbo: Tensor, advantage: Tensor) -> Tensor:
    """`-A mean_j (1 + d_j)` where A >= 0, `-A mean_j exp(d_j)` where A < 0: BGPO's bound (eqs. 9-14), [B].

    Never below the exact objective `-A exp(mean_j d_j)`, and equal in value and gradient on policy. It is a sum over j,
    so one mask at a time can be run forwards and backwards (divide by M): memory does not grow with M.
    """
    difference = elbo - old_elbo.detach()
    weight = advantage.detach().to(elbo.dtype)[:, None]
    return -(weight * torch.where(weight >= 0, 1.0 + difference, difference.exp())).mean(dim=1)
