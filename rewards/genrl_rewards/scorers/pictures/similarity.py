"""Reward: how similar two pictures are pixel by pixel (SSIM) or to a network (LPIPS), by torchmetrics.

LPIPS (arXiv 1801.03924) by torchmetrics, on torchvision's weights of the network below it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from PIL.Image import Image

from genrl_rewards.contract import check_choice
from genrl_rewards.extras import install
from genrl_rewards.models import torchvision_compat
from genrl_rewards.models.pixels import frames, from_pil, mean_over_frames, once_per_frame, resize


def lpips(net: str, device: str, reward: str) -> Any:
    """The LPIPS of two pictures [1, 3, H, W] in [0, 1], on AlexNet (`alex`) or VGG-16 (`vgg`), differentiable.

    Weights come from torch's cache (`TORCH_HOME`), or are downloaded. Raises ValueError where they cannot be, and where
    torchvision or torchmetrics is not installed.
    """
    if torchvision_compat.ensure() == "absent":
        raise ValueError(f"{reward}: the metric 'lpips' needs torchvision: pip install torchvision")
    if find_spec("torchmetrics") is None:
        raise ValueError(f"{reward}: the metric 'lpips' needs torchmetrics: {install('similarity')}")
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    try:
        metric = LearnedPerceptualImagePatchSimilarity(net_type=net, normalize=True)  # type: ignore[arg-type]
    except OSError as error:
        name = {"alex": "AlexNet", "vgg": "VGG-16"}[net]
        raise ValueError(
            f"{reward}: the {name} weights for 'lpips' cannot be downloaded (offline?): {error}"
        ) from error
    return metric.eval().requires_grad_(False).to(device)


METRICS = ("ssim", "lpips")


class Similarity:
    """Similarity to the sample's reference picture: SSIM, or 1 - LPIPS.

    The reference is the file in the column `reference_image`, resized to the sample's size.

    `metric` `ssim` (default): structural similarity (Wang et al. 2004), in [-1, 1], 1 for the same picture;
             `lpips`: 1 - LPIPS with AlexNet (arXiv 1801.03924), at most 1. LPIPS needs torchvision, whose weights for
             AlexNet are downloaded at first use

    A video gets the mean over its frames. To keep an edit close to its source, name the source in `reference_image`.
    """

    differentiable = True

    def __init__(self, metric: str = "ssim", device: str = "cpu"):
        check_choice("similarity: unknown metric", metric, METRICS)
        self.device = device
        torchvision_compat.ensure()  # torchmetrics imports a torchvision that is there
        self._lpips = lpips("alex", device, "similarity") if metric == "lpips" else None

    def to(self, device: str) -> None:
        """Move the model, if the metric has one."""
        self.device = device
        if self._lpips is not None:
            self._lpips.to(device)

    def __call__(self, images: torch.Tensor, reference_images: list[Image]) -> torch.Tensor:
        pictures = frames(images).to(self.device)
        height, width = pictures.shape[-2:]
        references = torch.cat([resize(from_pil(r), height, width).clamp(0, 1) for r in reference_images])
        references = once_per_frame(references, images).to(pictures)
        return mean_over_frames(self._similarity(pictures, references), images).to(images.device)

    def _similarity(self, pictures: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
        if self._lpips is not None:
            pairs = zip(pictures, references, strict=True)  # one at a time: the metric returns the mean of a batch
            return 1 - torch.stack([self._lpips(a[None].clamp(0, 1), b[None]) for a, b in pairs])
        from torchmetrics.functional.image import structural_similarity_index_measure as ssim

        similarity = ssim(pictures, references, data_range=1.0, reduction="none")
        assert isinstance(similarity, torch.Tensor)  # a tuple only with return_contrast_sensitivity or the full image
        return similarity.reshape(len(pictures))
