"""Pictures on their way to a reward: their layout, rounding to 8 bits, and reading them from files."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from PIL.Image import Image

MAX_PIXELS = 2**26
"""The most pixels that a picture file may have: 8192 x 8192."""


def check_images(images: torch.Tensor) -> None:
    """Raise ValueError unless `images` is float [N, 3, H, W] or [N, F, 3, H, W]. Range and layout are never guessed."""
    if not images.is_floating_point() or images.ndim not in (4, 5) or images.shape[-3] != 3:
        raise ValueError(
            f"images must be float [N, 3, H, W] or [N, F, 3, H, W] in [0, 1], not {images.dtype} {list(images.shape)}"
        )


def to_uint8(images: torch.Tensor) -> np.ndarray:
    """float [..., 3, H, W] in [0, 1] as uint8 [..., H, W, 3]: 255 x, rounded half to even, then clamped."""
    import torch

    levels = (images.detach().to(torch.float32) * 255).round_().clamp_(0, 255)
    return levels.to(torch.uint8).movedim(-3, -1).cpu().numpy()


def pil_list(images: torch.Tensor) -> list[Image]:
    """float [N, 3, H, W] in [0, 1] as N Pillow pictures, rounded to 8 bits."""
    from PIL import Image

    return [Image.fromarray(image) for image in to_uint8(images)]


def to_pil(images: torch.Tensor) -> list[Image] | list[list[Image]]:
    """float [N, 3, H, W] in [0, 1] as N Pillow pictures, a video [N, F, 3, H, W] as N lists of F; 8 bits."""
    return [pil_list(video) for video in images] if images.ndim == 5 else pil_list(images)


def open_picture(file: str | Path | Image) -> Image:
    """The picture in a file as Pillow RGB, turned upright by its EXIF tag; an open picture is converted.

    Raises ValueError, naming the file, if it is missing or broken, or `check_header` refuses it.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower
            picture = file if isinstance(file, Image.Image) else Image.open(file)
            check_header(picture)
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"picture {str(file)!r} cannot be read: {error}") from error


def check_header(picture: Image) -> None:
    """Raise ValueError if a picture has more than 8 bits per channel, or more than `MAX_PIXELS` pixels."""
    if picture.width * picture.height > MAX_PIXELS:
        raise ValueError(f"it has {picture.width} x {picture.height} pixels; the limit is {MAX_PIXELS:,}")
    if picture.mode[0] in "IF":  # Pillow would clip 16 bits to white
        raise ValueError(f"its pixels have more than 8 bits (mode {picture.mode}); save it with 8")
