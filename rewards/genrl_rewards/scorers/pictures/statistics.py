"""Statistics of the picture itself: no model, no prompt. Meant to be monitored with weight 0.

They are the first to show that a policy pleases a reward by noise, blur or garish colours. `jpeg` is also commonly used
as a reward in smoke tests (Black et al. 2023, arXiv 2305.13301, section 5.1).
"""

from __future__ import annotations

import io

import torch
from PIL import Image

from genrl_rewards.contract import check_choice
from genrl_rewards.models.pixels import frames, mean_over_frames
from genrl_rewards.pictures import pil_list

JPEG_QUALITY = 95
JPEG_SCALES = {"incompressibility": 1.0, "compressibility": -1.0, "compressibility_500": -1 / 500}
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def jpeg_kilobytes(picture: Image.Image) -> float:
    """Size of the picture as a JPEG of quality 95 with Pillow's default subsampling, in units of 1000 bytes."""
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=JPEG_QUALITY)
    return buffer.tell() / 1000


def jpeg(images: torch.Tensor, scale: str = "incompressibility") -> torch.Tensor:
    """Size as a JPEG of quality 95: a smoke test, and a monitor of noise. A few kB at 64 pixels, 100 to 600 at 512.

    `scale`: `incompressibility` kB, `compressibility` -kB, `compressibility_500` -kB / 500, as some trainers have it.
    It depends on the size of the picture in pixels, and by a few bytes on the version of libjpeg. A video gets the mean
    over its frames; [N].
    """
    check_choice("jpeg: unknown scale", scale, JPEG_SCALES)
    sizes = torch.tensor([jpeg_kilobytes(picture) for picture in pil_list(frames(images))], dtype=torch.float64)
    return mean_over_frames(sizes * JPEG_SCALES[scale], images)


def sharpness(images: torch.Tensor) -> torch.Tensor:
    """Variance of the Laplacian: a monitor of blur and noise. 0 for a flat picture, .001 to .05 for photographs.

    The 4-neighbour Laplacian of luma in [0, 1], without the pixels of the border (Pech-Pacheco et al. 2000). It depends
    on the picture's size, and is larger for noise. A video gets the mean over its frames; [N].
    """
    pictures = frames(images)
    luma = (pictures * pictures.new_tensor(LUMA).view(1, 3, 1, 1)).sum(1)
    inner = luma[:, 1:-1, 1:-1]
    laplacian = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] + luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:] - 4 * inner
    return mean_over_frames(laplacian.flatten(1).var(1, correction=0), images)


def saturation(images: torch.Tensor) -> torch.Tensor:
    """Mean saturation of the colours: a monitor of garish pictures. 0 for grey and black, 1 for pure colours.

    (max - min) / max of the three colours, as in HSV. A video gets the mean over its frames; [N].
    """
    pictures = frames(images)
    high, low = pictures.amax(1), pictures.amin(1)
    return mean_over_frames(((high - low) / high.clamp_min(1e-6)).flatten(1).mean(1), images)


sharpness.differentiable = True  # type: ignore[attr-defined]
saturation.differentiable = True  # type: ignore[attr-defined]
