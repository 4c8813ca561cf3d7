"""Preference losses: D3PO and SPO on single steps; DPO and its kin on token sequences, and on pictures by their errors.

All of them score a pair by one number, how much more the policy than the reference prefers the winner, and take
`-log sigmoid` of it. Shapes: one value per pair, [P]; index 0 of a pair is not preferred by its place.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from genrl.objectives.surrogates.bounds import MEAN_LOSSES, PairLoss


class PreferenceOutput(NamedTuple):
    """loss [P]; logit [P], what its sigmoid is taken of; correct [P] (bool): the policy has the pair in order."""

    loss: Tensor
    logit: Tensor
    correct: Tensor


def step_preference_loss(
    log_prob_a: Tensor,
    ref_log_prob_a: Tensor,
    log_prob_b: Tensor,
    ref_log_prob_b: Tensor,
    preference: Tensor,
    *,
    beta: float,
    clip: float = 0.1,
) -> PreferenceOutput:
    """`-log sigmoid(beta h (log rho_a - log rho_b))`, rho = p_theta / p_ref of one step, clipped to 1 +- clip.

    All [P]. D3PO (arXiv 2311.13231; code): both chains of a pair inherit the preference h of their images, +1 for a, -1
    for b (0, a tie, costs log 2 and teaches nothing); beta .1. SPO (arXiv 2406.04314): a and b are two candidates
    sampled from one state and compared at that step; beta 10. The reference is fixed. A clipped side has no gradient.
    Log-probabilities are element means in both. Raises ValueError unless beta > 0 and 0 <= clip < 1.
    """
    if beta <= 0 or not 0 <= clip < 1:
        raise ValueError(f"beta must be positive and clip in [0, 1), got {beta} and {clip}")
    ratios = [
        # Clipped as ratios: beyond the bounds a side has a value and no gradient.
        (log_prob - ref.detach()).exp().clamp(1.0 - clip, 1.0 + clip).log()
        for log_prob, ref in ((log_prob_a, ref_log_prob_a), (log_prob_b, ref_log_prob_b))
    ]
    logit = beta * preference.detach().to(log_prob_a.dtype) * (ratios[0] - ratios[1])
    return PreferenceOutput(-F.logsigmoid(logit), logit, (logit > 0).detach())


def pair_loss(
    kind: PairLoss,
    win: Tensor,
    lose: Tensor,
    tokens_win: Tensor | None = None,
    tokens_lose: Tensor | None = None,
    *,
    beta: float,
    smoothing: float = 0.0,
) -> PreferenceOutput:
    """Loss of pairs of answers, each by h, the sum over its tokens of log-prob - log-prob under the reference, [P]. Of
    pictures h is how much the squared error of the network has fallen, and Diffusion-DPO sigmoid at half of its beta
    (arXiv 2311.12908, eq. 14).

    sigmoid: DPO, `-log sigmoid(beta D)`, D = h_w - h_l (arXiv 2305.18290, eq. 7), with smoothing e of labels that are
    wrong so often; robust: unbiased for them (2403.00409); ipo: `(h_w / n_w - h_l / n_l - 1 / (2 beta))^2` over means
    of tokens (2310.12036, as TRL has it); hinge: `max(0, 1 - beta D)` (2305.10425); sigmoid_norm: DPO on means of
    tokens; nca_pair (2402.05369), apo_zero, apo_down (2408.06266), sppo_hard (2405.00675): these look at each side by
    itself. orpo: `-beta log sigmoid` of the difference of log-odds of mean log-probabilities (2403.07691), without a
    reference: win and lose are sums of log-probabilities alone. It belongs beside the likelihood of the winner.
    tokens_win, tokens_lose: numbers of tokens [P], of the losses on means. Raises ValueError for beta <= 0.
    """
    if beta <= 0:
        raise ValueError(f"beta must be positive, got {beta}")
    if kind in MEAN_LOSSES:
        if tokens_win is None or tokens_lose is None:
            raise ValueError(f"{kind} is of means over tokens: give their numbers")
        win, lose = win / tokens_win, lose / tokens_lose
    if kind == "orpo":
        # odds of more than a million to one count as that: of 1 they are infinite
        win, lose = (mean - torch.log(-torch.expm1(mean.clamp(max=-1e-6))) for mean in (win, lose))
        return PreferenceOutput(-beta * F.logsigmoid(win - lose), win - lose, (win > lose).detach())
    a, b, logit, log = beta * win, beta * lose, beta * (win - lose), F.logsigmoid
    if kind in ("sigmoid", "sigmoid_norm"):
        loss = -(1.0 - smoothing) * log(logit) - smoothing * log(-logit)
    elif kind == "robust":
        loss = (-(1.0 - smoothing) * log(logit) + smoothing * log(-logit)) / (1.0 - 2.0 * smoothing)
    elif kind == "ipo":
        loss = (win - lose - 1.0 / (2.0 * beta)).square()
    elif kind == "hinge":
        loss = (1.0 - logit).relu()
    elif kind == "nca_pair":
        loss = -log(a) - 0.5 * log(-a) - 0.5 * log(-b)
    elif kind == "apo_zero":
        loss = 1.0 - a.sigmoid() + b.sigmoid()
    elif kind == "apo_down":
        loss = a.sigmoid() + 1.0 - logit.sigmoid()
    elif kind == "sppo_hard":
        loss = (win - 1.0 / (2.0 * beta)).square() + (lose + 1.0 / (2.0 * beta)).square()
    else:
        raise ValueError(f"kind must be one of {', '.join(get_args(PairLoss))}; got {kind!r}")
    return PreferenceOutput(loss, logit, (logit > 0).detach())


def marked_loss(h: Tensor, good: Tensor, baseline: Tensor | float, *, beta: float) -> PreferenceOutput:
    """`1 - sigmoid(beta (h - z))` of answers that are marked good, `1 - sigmoid(beta (z - h))` of others, [B]: KTO
    (arXiv 2402.01306, eq. 8), without its weights. h as in `pair_loss`; good: bool; baseline: z, at least 0, without
    gradient: the mean of h over answers to other questions. With z = 0 it is APO-zero for answers without pairs."""
    if beta <= 0:
        raise ValueError(f"beta must be positive, got {beta}")
    logit = torch.where(good, 1.0, -1.0) * beta * (h - baseline)
    return PreferenceOutput(1.0 - logit.sigmoid(), logit, (logit > 0).detach())


def preference_pairs(rewards: Tensor, group: Tensor, *, ties: bool = False) -> Tensor:
    """All pairs of scored samples of one group, int64 [P, 3]: (a, b, h), a < b, h = +1 where a is better, -1 where b.

    ties adds the pairs of equal scores with h = 0; D3PO skips them. One pair per group: `advantages.best_and_worst`.
    rewards [N] (NaN = no score), group int64 [N].
    """
    if rewards.dim() != 1 or rewards.shape != group.shape:
        raise ValueError(
            f"rewards and group must be vectors of one length; got {list(rewards.shape)} and {list(group.shape)}"
        )
    scored = ~rewards.isnan()
    mates = (group[:, None] == group[None, :]) & scored[:, None] & scored[None, :]
    first, second = mates.triu(diagonal=1).nonzero().unbind(dim=1)
    sign = (rewards[first] - rewards[second]).sign().long()
    decided = (sign != 0) | ties
    return torch.stack([first, second, sign], dim=1)[decided]


def step_winners(scores: Tensor, *, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """SPO's comparison of k candidates per state: (winner [n], loser [n], valid [n]) from scores [k, n].

    A comparison counts where the preference between best and worst is decided enough: the difference of their softmax,
    `tanh((s_max - s_min) / 2)`, exceeds threshold in [0, 1).
    """
    best, worst = scores.max(dim=0), scores.min(dim=0)
    valid = torch.tanh((best.values - worst.values) / 2.0) > threshold
    return best.indices, worst.indices, valid
