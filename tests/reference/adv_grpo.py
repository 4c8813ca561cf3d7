"""Adv-GRPO (arXiv 2511.20256): the released reward of its discriminator."""

from __future__ import annotations

from torch import Tensor


def adversarial_reward(image: Tensor, patches: Tensor, *, patch_weight: float) -> Tensor:
    """`(1 - patch_weight) h(class token) + patch_weight <h(patches)>`, [B]: the reward of image [B], patches [B, P]."""
    return (1.0 - patch_weight) * image + patch_weight * patches.mean(dim=1)
