"""Losses of pairs: D3PO and SPO on single steps; DPO and its kin on token sequences, and on pictures by their errors;
a judge trained beside the policy (Adv-GRPO's discriminator) to tell what is real from what the policy made.

A preference loss scores a pair by one number, how much more the policy than the reference prefers the winner, and takes
`-log sigmoid` of it. Shapes: one value per pair, [P]; index 0 of a pair is not preferred by its place.

The policy's loss in Adv-GRPO (arXiv 2511.20256; constants of the released code) is Flow-GRPO's; here are the
discriminator's. Shapes: logits of whole images [B] (from the class token) and of patches [B, P]; "real" are references,
"fake" samples; the two need not be equally many, and both must have gone through one and the same preprocessing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from genrl.objectives import MEAN_LOSSES, PairLoss


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


def preference_pairs(rewards: Tensor, group: Tensor) -> Tensor:
    """All pairs of samples of one group with unequal scores, int64 [P, 3]: (a, b, h), a < b, h = +1 where a is better,
    -1 where b. One pair per group: `groups.best_and_worst`. rewards [N] (NaN = no score), group int64 [N]."""
    if rewards.dim() != 1 or rewards.shape != group.shape:
        raise ValueError(
            f"rewards and group must be vectors of one length; got {list(rewards.shape)} and {list(group.shape)}"
        )
    scored = ~rewards.isnan()
    mates = (group[:, None] == group[None, :]) & scored[:, None] & scored[None, :]
    first, second = mates.triu(diagonal=1).nonzero().unbind(dim=1)
    sign = (rewards[first] - rewards[second]).sign().long()
    return torch.stack([first, second, sign], dim=1)[sign != 0]


def step_winners(scores: Tensor, *, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """SPO's comparison of k candidates per state: (winner [n], loser [n], valid [n]) from scores [k, n].

    A comparison counts where the preference between best and worst is decided enough: the difference of their softmax,
    `tanh((s_max - s_min) / 2)`, exceeds threshold in [0, 1).
    """
    best, worst = scores.max(dim=0), scores.min(dim=0)
    valid = torch.tanh((best.values - worst.values) / 2.0) > threshold
    return best.indices, worst.indices, valid


DiscriminatorLoss = Literal["hinge", "bce"]


class DiscriminatorOutput(NamedTuple):
    """loss []; accuracy in [0, 1]: mean of the shares of real whole images above 0 and of fake ones below, or of the
    pairs whose real one is above."""

    loss: Tensor
    accuracy: float


def discriminator_loss(real: Tensor, fake: Tensor, *, kind: DiscriminatorLoss = "hinge") -> Tensor:
    """`(<max(0, 1 - h(real))> + <max(0, 1 + h(fake))>) / 2`, []; "bce": of binary cross-entropies instead of hinges."""
    if kind == "hinge":
        return 0.5 * ((1.0 - real).relu().mean() + (1.0 + fake).relu().mean())
    if kind == "bce":
        # softplus(-x) is -log sigmoid(x) without the overflow of an exponential.
        return 0.5 * (F.softplus(-real).mean() + F.softplus(fake).mean())
    raise ValueError(f"kind must be 'hinge' or 'bce', got {kind!r}")


def adversary_loss(
    real: Sequence[Tensor],
    fake: Sequence[Tensor],
    *,
    patch_weight: float = 0.3,
    kind: DiscriminatorLoss | Literal["preference"] = "hinge",
) -> DiscriminatorOutput:
    """Loss on whole images + patch_weight x loss on patches, if there are: one head on the class token and on patches
    of each image. Or, of whole images alone, the mean `preference_loss` of real[0] over fake[0].

    real, fake: [B] of whole images, and perhaps [B, P] of patches, P of them sampled per image (64, with replacement,
    in the released code).
    """
    if kind == "preference":
        right = (real[0] > fake[0]).double().mean()
        return DiscriminatorOutput(preference_loss(real[0], fake[0]).mean(), float(right))
    loss, *of_patches = (discriminator_loss(r, f, kind=kind) for r, f in zip(real, fake, strict=True))
    for patch_loss in of_patches:
        loss = loss + patch_weight * patch_loss
    right = (real[0].detach() > 0).double().mean() + (fake[0].detach() < 0).double().mean()
    return DiscriminatorOutput(loss, float(right) / 2.0)


def preference_loss(reference: Tensor, generated: Tensor) -> Tensor:
    """`-log softmax over (s_ref, s_gen)` of the reference, [B]: what a CLIP reward is trained by.

    The Bradley-Terry loss of a reward model (arXiv 2305.18290, eq. 2).

    The reference image is to be preferred to the sample for its prompt. Scores [B] are `exp(logit scale) <text, image>`
    of unit features.
    """
    return -torch.stack([reference, generated], dim=1).log_softmax(dim=1)[:, 0]


def reward_model_lags(reference_rewards: Tensor, rewards: Tensor) -> bool:
    """The other schedule: the reward model is trained while it rates the samples above the references on average.

    Rewards [R] of the references and [N] of the samples, of all processes; missing scores (NaN) are left out.
    """
    return bool(reference_rewards.nanmean() < rewards.nanmean())
