"""Reward: how alike two pictures are pixel by pixel (SSIM) or to a network's eye (LPIPS), through torchmetrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rewards.contract import nearest
from rewards.models.pixels import frames, from_pil, mean_over_frames, resize

if TYPE_CHECKING:
    from PIL.Image import Image

METRICS = ("ssim", "lpips")


class Similarity:
    """Likeness to the sample's reference picture (column `reference_image`), resized to the sample's size.

    `metric` `ssim` (default): structural similarity (Wang et al. 2004), in [-1, 1], 1 for the same picture;
             `lpips`: 1 - LPIPS with AlexNet (arXiv 1801.03924), at most 1. LPIPS needs torchvision, whose weights of
             AlexNet are downloaded at first use

    A video scores the mean over its frames. Name the source picture in `reference_image` to hold an edit close to it.
    """

    differentiable = True

    def __init__(self, metric: str = "ssim", device: str = "cpu"):
        if metric not in METRICS:
            known = ", ".join(METRICS)
            raise ValueError(f"similarity: unknown metric {metric!r}.{nearest(metric, METRICS)} Known: {known}")
        self.metric, self.device = metric, device
        self._lpips = _lpips(device) if metric == "lpips" else None

    def to(self, device: str) -> None:
        """Move the model, where the metric has one."""
        self.device = device
        if self._lpips is not None:
            self._lpips.to(device)

    def __call__(self, images: torch.Tensor, reference_images: Sequence[Image]) -> torch.Tensor:
        pictures = frames(images).to(self.device)
        height, width = pictures.shape[-2:]
        references = torch.cat([resize(from_pil(r), height, width).clamp(0, 1) for r in reference_images])
        references = references.to(pictures).repeat_interleave(len(pictures) // len(references), 0)
        return mean_over_frames(self._alike(pictures, references), images).to(images.device)

    def _alike(self, pictures: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
        if self._lpips is not None:
            pairs = zip(pictures.split(1), references.split(1), strict=True)  # it gives the mean of a batch
            return 1 - torch.stack([self._lpips(a.clamp(0, 1), b) for a, b in pairs])
        from torchmetrics.functional.image import structural_similarity_index_measure as ssim

        found: Any = ssim(pictures, references, data_range=1.0, reduction="none")
        return found.reshape(len(pictures))


def _lpips(device: str) -> Any:
    from rewards.models.torchvision_compat import ensure

    if ensure() == "absent":
        raise ValueError("similarity: the metric 'lpips' needs torchvision: pip install torchvision")
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    try:
        metric = LearnedPerceptualImagePatchSimilarity(net_type="alex", normalize=True)
    except OSError as error:
        raise ValueError(f"similarity: the weights of AlexNet for 'lpips' cannot be had (offline?): {error}") from error
    return metric.eval().requires_grad_(False).to(device)
