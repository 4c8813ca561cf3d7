"""Pictures as the published policies take them: resized without distortion, the rest of the square black."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional


def letterbox(image: Tensor, size: tuple[int, int], padding: Literal["centre", "top_left"]) -> Tensor:
    """image [B, 3, H, W] in [0, 1] -> [B, 3, *size] in [0, 1]: bilinear, longer side fitted, padded with 0.

    padding: around the picture (pi0, pi0.5), or above and left of it (SmolVLA).
    """
    height, width = image.shape[-2:]
    if (height, width) == tuple(size):
        return image
    ratio = max(width / size[1], height / size[0])
    inner = (int(height / ratio), int(width / ratio))
    image = functional.interpolate(image, inner, mode="bilinear", align_corners=False).clamp(0.0, 1.0)
    high, wide = size[0] - inner[0], size[1] - inner[1]
    above, left = (high // 2, wide // 2) if padding == "centre" else (high, wide)
    return functional.pad(image, (left, wide - left, above, high - above))
