"""Reward: human preference, by HPSv2 and HPSv2.1 (Wu et al. 2023, arXiv 2306.09341).

The checkpoint is an open_clip ViT-H/14, and open_clip loads it and splits the texts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from genrl_rewards.contract import check_choice
from genrl_rewards.models import pixels
from genrl_rewards.models.checkpoints import find
from genrl_rewards.models.clip_model import CHUNK, cosines_with_prompts

logger = logging.getLogger(__name__)

MODEL = "xswu/HPSv2"
ARCHITECTURE = "ViT-H-14"  # open_clip's name
FILES = {
    "2.1": ("HPS_v2.1_compressed.safetensors", "HPS_v2.1_compressed.pt"),
    "2.0": ("HPS_v2_compressed.safetensors", "HPS_v2_compressed.pt"),
}


class HPSv2:
    """Human preference for the prompt: HPSv2.1 or 2.0, a cosine, usually .20 to .34 (2.1) or .24 to .29 (2.0).

    Scores of the two versions are not comparable. Published tables show 100 times the score. A video gets the mean over
    its frames.

    `version` `2.1` (default) or `2.0`
    `model`   hub id, folder or file of the checkpoint (`HPS_v2.1_compressed.pt`)
    `dtype`   of the model: `float32` (default), `bfloat16`, `float16`
    """

    differentiable = True

    def __init__(self, version: str = "2.1", model: str = MODEL, dtype: str = "float32", device: str = "cpu"):
        version = str(version)  # YAML reads 2.1 as a number
        check_choice("hpsv2: unknown version", version, FILES)
        from genrl_rewards.models.open_clip_model import OpenClipScorer

        file = find(model, FILES[version], "hpsv2")
        self.clip = OpenClipScorer(f"{ARCHITECTURE}/{file}", device, "hpsv2", dtype)
        self.to = self.clip.to
        self.side: int = self.clip.model.visual.image_size[0]
        logger.info("HPSv%s from %s", version, file)

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        embeds = pixels.in_batches(self._embed, CHUNK, pixels.frames(images))
        return cosines_with_prompts(embeds, self.clip.embed_texts(prompts), images)

    def _embed(self, images: torch.Tensor) -> torch.Tensor:
        # The authors read files; rounding has no gradient, so it is left out where one is wanted.
        images = images if pixels.wants_gradients(images) else pixels.eight_bit(images)
        square = pixels.pad_to(images.to(self.clip.device), self.side)
        return self.clip.embed_prepared(pixels.normalise(square, pixels.OPENAI_MEAN, pixels.OPENAI_STD))
