"""Reward: human preference, by PickScore (Kirstain et al. 2023, arXiv 2305.01569)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from genrl_rewards.contract import check_choice
from genrl_rewards.models.clip_model import OPEN_CLIP, load_clip

MODEL = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

SCALES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "over_26": lambda cos, logit_scale: logit_scale * cos / 26,
    "raw": lambda cos, logit_scale: logit_scale * cos,
    "minus_18_over_8": lambda cos, logit_scale: (logit_scale * cos - 18) / 8,
    "cosine": lambda cos, logit_scale: cos,
}


def pickscore(cos: torch.Tensor, logit_scale: float, scale: str = "over_26") -> torch.Tensor:
    """PickScore from the cosine of the embeddings of image and prompt, elementwise.

    With s = logit_scale cos (section 4 of the paper; `logit_scale` is the exponential, 100 in the checkpoint):
    `over_26` s / 26, which most trainers use and which can exceed 1; `raw` s, about 16 to 26 for pictures;
    `minus_18_over_8` (s - 18) / 8; `cosine` without the logit scale. Within one group all give the same order;
    in a weighted sum with other rewards the choice is a choice of weight.
    """
    return SCALES[scale](cos, logit_scale)


class PickScore:
    """Human preference for the prompt: PickScore v1, usually .6 to 1 (over 26).

    `model`     hub id or folder of a CLIPModel, or `open_clip:MODEL`
    `processor` hub id or folder of its tokenizer and image processor; null: those of the published model
    `scale`     `over_26` (default), `raw`, `minus_18_over_8`, `cosine`; see `pickscore`
    `dtype`     of the model: `float32` (default), `bfloat16`, `float16`

    A video gets the mean over its frames.
    """

    differentiable = True

    def __init__(
        self,
        model: str = MODEL,
        processor: str | None = None,
        scale: str = "over_26",
        dtype: str = "float32",
        device: str = "cpu",
    ):
        check_choice("pickscore: unknown scale", scale, SCALES)
        self.scale = scale
        default = None if model.startswith(OPEN_CLIP) else PROCESSOR
        self.scorer = load_clip(model, processor or default, device, "pickscore", dtype)
        self.to = self.scorer.to

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return pickscore(self.scorer.cosines(images, prompts), self.scorer.logit_scale, self.scale)
