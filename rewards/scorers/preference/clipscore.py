"""Reward: does the picture fit the prompt, by CLIP? (Hessel et al. 2021, arXiv 2104.08718.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rewards.contract import check_choice
from rewards.models.clip_model import load_clip

MODEL = "openai/clip-vit-large-patch14"

SCALES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cosine": lambda cos: cos,
    "over_30": lambda cos: 100 * cos / 30,
    "hessel": lambda cos: 2.5 * cos.clamp_min(0),
    "torchmetrics": lambda cos: 100 * cos.clamp_min(0),
}


def clipscore(cos: torch.Tensor, scale: str = "cosine") -> torch.Tensor:
    """CLIPScore from the cosine of the embeddings of image and prompt, elementwise.

    `cosine` unchanged; `over_30` 100 cos / 30, as some trainers have it; `hessel` 2.5 max(cos, 0), equation 1 of the
    paper; `torchmetrics` 100 max(cos, 0). Within one group all give the same order.
    """
    return SCALES[scale](cos)


class ClipScore:
    """Cosine of CLIP's embeddings of picture and prompt, in [-1, 1], usually .1 to .4.

    `model`     hub id or folder of a CLIPModel, or `open_clip:MODEL`
    `processor` hub id or folder of its tokenizer and image processor; null: that of `model`
    `scale`     `cosine` (default), `over_30`, `hessel`, `torchmetrics`; see `clipscore`
    `dtype`     of the model: `float32` (default), `bfloat16`, `float16`

    A video gets the mean over its frames.
    """

    differentiable = True

    def __init__(
        self,
        model: str = MODEL,
        processor: str | None = None,
        scale: str = "cosine",
        dtype: str = "float32",
        device: str = "cpu",
    ):
        check_choice("clipscore: unknown scale", scale, SCALES)
        self.scale = scale
        self.scorer = load_clip(model, processor, device, "clipscore", dtype)
        self.to = self.scorer.to

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return clipscore(self.scorer.cosines(images, prompts), self.scale)
