"""Adv-GRPO: a discriminator between reference images and samples, trained beside the policy as its reward.

(arXiv 2511.20256; constants of the released code.) The policy's loss is Flow-GRPO's; here are the discriminator's.
Shapes: logits of whole images [B] (from the class token) and of patches [B, P]; "real" are references, "fake" samples;
the two need not be equally many. Both sides must have gone through one and the same preprocessing and normalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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


def preference_loss(reference: Tensor, generated: Tensor, *, ties: bool = False) -> Tensor:
    """`-log softmax over (s_ref, s_gen)` of the reference, [B]: what a CLIP reward is trained by.

    The Bradley-Terry loss of a reward model (arXiv 2305.18290, eq. 2).

    The reference image is to be preferred to the sample for its prompt. Scores [B] are `exp(logit scale) <text, image>`
    of unit features. ties: neither is preferred, the cross-entropy with (1/2, 1/2) less log 2, so that it is 0 where
    both score the same.
    """
    log_prob = torch.stack([reference, generated], dim=1).log_softmax(dim=1)
    if not ties:
        return -log_prob[:, 0]
    half = torch.full_like(log_prob, 0.5)
    return (half * (half.log() - log_prob)).sum(dim=1)


def reward_model_lags(reference_rewards: Tensor, rewards: Tensor) -> bool:
    """The other schedule: the reward model is trained while it rates the samples above the references on average.

    Rewards [R] of the references and [N] of the samples, of all processes; missing scores (NaN) are left out.
    """
    return bool(reference_rewards.nanmean() < rewards.nanmean())
