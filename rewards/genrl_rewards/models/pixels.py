"""Pictures as tensors on their way into a model: frames and batches, and differentiable resizing, cropping, padding.

Resizing is bicubic with antialiasing (Pillow's filter, on floats). Without antialiasing, shrinking 512 to 224 pixels
would change the model's input by up to 2 standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def from_pil(picture: Image) -> torch.Tensor:
    """A Pillow RGB picture as float32 [1, 3, H, W] in [0, 1]."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255


def frames(images: torch.Tensor) -> torch.Tensor:
    """All frames as pictures: [N, 3, H, W] unchanged, a video [N, F, 3, H, W] as [N F, 3, H, W]."""
    return images if images.ndim == 4 else images.flatten(0, 1)


def once_per_frame(rows: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """One row per sample, [N, ...], repeated to one per picture of `frames(images)`, [N F, ...]."""
    return rows if images.ndim == 4 else rows.repeat_interleave(images.shape[1], 0)


def mean_over_frames(per_frame: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """The scores [N F] of `frames(images)` as one per sample, [N]."""
    return per_frame.reshape(len(images), -1).mean(1)


def in_batches(call: Callable[..., torch.Tensor], size: int, *rows: Sequence[Any] | torch.Tensor) -> torch.Tensor:
    """The results of `call` on at most `size` rows at a time (of each of `rows`), concatenated."""
    starts = range(0, len(rows[0]), size)
    return torch.cat([call(*(values[start : start + size] for values in rows)) for start in starts])


def wants_gradients(images: torch.Tensor) -> bool:
    """Whether the caller will differentiate the score: then Pillow and rounding must be avoided."""
    return torch.is_grad_enabled() and images.requires_grad


def eight_bit(images: torch.Tensor) -> torch.Tensor:
    """Rounded to the 256 levels of a picture file, half to even, in [0, 1]."""
    return (images * 255).round().clamp(0, 255) / 255


def resize(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[N, C, H, W] to [N, C, height, width], bicubic with antialiasing."""
    if images.shape[-2:] == (height, width):
        return images
    return torch.nn.functional.interpolate(images, (height, width), mode="bicubic", antialias=True)


def shortest_side(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width after the shorter side becomes `size`; the other is rounded down."""
    short = min(height, width)
    return (size, int(size * width / height)) if height == short else (int(size * height / width), size)


def central(images: torch.Tensor, size: int, half: Callable[[float], int] = math.floor) -> torch.Tensor:
    """The central square, [N, 3, size, size]. half: rounds what is cut off above and on the left: transformers down,
    torchvision (`round`) to the nearest even number."""
    top, left = (half((side - size) / 2) for side in images.shape[-2:])
    return images[..., top : top + size, left : left + size]


def crop_to(images: torch.Tensor, size: int, half: Callable[[float], int] = math.floor) -> torch.Tensor:
    """Shorter side to `size`, then the central square (`central`): CLIP's own preparation, [N, 3, size, size]."""
    height, width = images.shape[-2:]
    # Bicubic overshoots at edges; Pillow's result has 8 bits and cannot.
    return central(resize(images, *shortest_side(height, width, size)).clamp(0, 1), size, half)


def longest_side(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width after the longer side becomes `size`; the other is rounded to nearest."""
    scale = size / max(height, width)
    return round(height * scale), round(width * scale)


def pad_to(images: torch.Tensor, size: int) -> torch.Tensor:
    """Longer side to `size`, then black borders left and right or above and below, [N, 3, size, size].

    This is HPSv2's preparation. Its authors' code adds no borders to a picture whose longer side is already `size`,
    which then is not square; here it gets them.
    """
    height, width = longest_side(images.shape[-2], images.shape[-1], size)
    left, top = (size - width) // 2, (size - height) // 2
    return torch.nn.functional.pad(resize(images, height, width), (left, size - width - left, top, size - height - top))


def normalise(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """(images - mean) / std for each channel of [N, 3, H, W]."""
    shape = (1, 3, 1, 1)
    return (images - images.new_tensor(mean).view(shape)) / images.new_tensor(std).view(shape)
