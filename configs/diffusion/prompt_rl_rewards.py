"""Rewards of configs/diffusion/prompt_rl.yaml: its prompts are paraphrases, judged by the captions that they stand for.

The checker of shapes reads the world's own grammar only. So these take the column `caption` of the prompt file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from genrl_rewards.scorers.objects.shapes import Shapes
from genrl_rewards.scorers.preference.clipscore import ClipScore

if TYPE_CHECKING:
    import torch


class CaptionShapes(Shapes):
    """`shapes`, of the caption."""

    def __call__(self, images: torch.Tensor, caption: list[str]) -> tuple[list[float], dict[str, list[float]]]:
        return super().__call__(images, caption)


class CaptionClip(ClipScore):
    """`clipscore`, of the caption."""

    def __call__(self, images: torch.Tensor, caption: list[str]) -> torch.Tensor:
        return super().__call__(images, caption)
