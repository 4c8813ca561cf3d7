"""Preference losses: Diffusion-DPO on matching errors, D3PO and SPO on single steps, DPO on token sequences.

All of them score a pair by one number, how much more the policy than the reference prefers the winner, and take
`-log sigmoid` of it. Shapes: one value per pair, [P]; index 0 of a pair is not preferred by its place.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PreferenceLoss = Literal["sigmoid", "hinge", "ipo"]


class PreferenceOutput(NamedTuple):
    """loss [P]; logit [P], what its sigmoid is taken of; correct [P] (bool): the policy has the pair in order."""

    loss: Tensor
    logit: Tensor
    correct: Tensor


def diffusion_dpo_loss(
    error_win: Tensor,
    error_lose: Tensor,
    ref_error_win: Tensor,
    ref_error_lose: Tensor,
    *,
    beta: float,
    half: bool = True,
    kind: PreferenceLoss = "sigmoid",
) -> PreferenceOutput:
    """`-log sigmoid(-beta/2 d)`, d = (e_w - e_l) - (e_w^ref - e_l^ref): Diffusion-DPO (arXiv 2311.12908, eq. 14).

    e [P] are squared errors of the network at one noise and level for both samples of the pair, averaged over elements
    (`forward_process.matching_error` for flows; of the noise prediction for others). beta takes the place of the
    paper's beta T weight(t): 5000 in its code for SDXL, 100 in Flow-GRPO's.
    half: False drops the 1/2, the convention of diffusers' SD 1.5 script (its 2500 is the same loss as 5000 with it).
    kind: "hinge" max(0, 1 + beta d); "ipo" (-d - 1 / (2 beta))^2. Both go without the 1/2.
    Gradient through error_win and error_lose only. Raises ValueError for beta <= 0.
    """
    if beta <= 0:
        raise ValueError(f"beta must be positive, got {beta}")
    difference = (error_win - error_lose) - (ref_error_win - ref_error_lose).detach()
    logit = -beta * difference
    if kind == "sigmoid":
        logit = 0.5 * logit if half else logit
        loss = -F.logsigmoid(logit)
    elif kind == "hinge":
        loss = (1.0 - logit).relu()
    elif kind == "ipo":
        loss = (-difference - 1.0 / (2.0 * beta)).square()
    else:
        raise ValueError(f"kind must be 'sigmoid', 'hinge' or 'ipo', got {kind!r}")
    return PreferenceOutput(loss, logit, (difference < 0).detach())


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


def dpo_loss(
    log_prob_win: Tensor, log_prob_lose: Tensor, ref_log_prob_win: Tensor, ref_log_prob_lose: Tensor, *, beta: float
) -> PreferenceOutput:
    """`-log sigmoid(beta [(l_w - l_w^ref) - (l_l - l_l^ref)])`: DPO (arXiv 2305.18290, eq. 7), l [P] of sequences."""
    if beta <= 0:
        raise ValueError(f"beta must be positive, got {beta}")
    logit = beta * ((log_prob_win - ref_log_prob_win.detach()) - (log_prob_lose - ref_log_prob_lose.detach()))
    return PreferenceOutput(-F.logsigmoid(logit), logit, (logit > 0).detach())


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
