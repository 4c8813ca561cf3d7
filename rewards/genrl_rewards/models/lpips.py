"""LPIPS (arXiv 1801.03924) by torchmetrics, on torchvision's weights of the network below it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from genrl_rewards.extras import install
from genrl_rewards.models import torchvision_compat


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
