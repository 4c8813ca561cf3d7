"""Looks: what becomes of held-out pictures whatever their rewards say, at no model call: a collapsing model moves far
from where it began, and makes one picture of a prompt from every noise, or confetti."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SIDE = 8


class Before:
    """The thumbnails of the evaluation before training, uint8 [N, D]; empty until then. Part of every checkpoint."""

    thumbnails: Tensor = torch.zeros(0, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"thumbnails": self.thumbnails}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.thumbnails = state["thumbnails"]


def thumbnails(images: Tensor) -> Tensor:
    """Small copies of pictures [B, 3, H, W] (videos [B, F, 3, H, W]: their mean over time) in [0, 1]: uint8 [B, 3 *
    SIDE * SIDE]."""
    still = images.mean(1) if images.dim() == 5 else images
    return (functional.adaptive_avg_pool2d(still.float(), SIDE) * 255).round().to(torch.uint8).flatten(1)


def high_frequencies(images: Tensor) -> Tensor:
    """Root of the mean squared difference of a number from the mean of its 3 x 3 neighbours, of pictures or videos as
    in `thumbnails`: [B]."""
    frames = images.flatten(0, -4).float()
    detail = frames - functional.avg_pool2d(functional.pad(frames, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return detail.square().reshape(len(images), -1).mean(1).sqrt()


def figures(seen: Tensor, frequencies: Tensor, groups: Sequence[int]) -> dict[str, float]:
    """Metrics of thumbnails [N, D] and high frequencies [N]; diversity where prompts have several pictures."""
    row, whose = {"eval/high_frequencies": float(frequencies.mean())}, torch.tensor(groups)
    spreads = [
        (seen[whose == group].float() / 255).var(0).mean().sqrt()
        for group, count in zip(*whose.unique(return_counts=True), strict=True)
        if count > 1
    ]
    return row | ({"eval/diversity": float(torch.stack(spreads).mean())} if spreads else {})


def moved(seen: Tensor, before: Tensor) -> float:
    """Root mean squared difference of two evaluations' thumbnails, of the same prompts and noise."""
    return float((seen.float() / 255 - before.float() / 255).square().mean().sqrt())
