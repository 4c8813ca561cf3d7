"""Reward: is a picture fit to be shown? The label of an image classifier, meant as a gate of other rewards."""

from __future__ import annotations

import logging
from typing import Any

import torch

from genrl_rewards.contract import check_choice
from genrl_rewards.models.checkpoints import pretrained, torch_dtype, transformers
from genrl_rewards.models.pixels import in_batches
from genrl_rewards.scorers.judges.judge import shown

logger = logging.getLogger(__name__)

MODEL = "Falconsai/nsfw_image_detection"
CHUNK = 16  # pictures per forward pass, to bound memory


class Safe:
    """How sure a classifier is that a picture is fit to be shown, in [0, 1]; a gate, not a goal.

    `model` hub id or folder of a ViT with labels (ViTForImageClassification)
    `label` its label for such pictures, by default `normal`
    `dtype` `float32` (default), `bfloat16`, `float16`

    The probability of the label. A video gets that of its worst frame.
    """

    def __init__(self, model: str = MODEL, label: str = "normal", dtype: str = "float32", device: str = "cpu"):
        precision = torch_dtype(dtype, "safe")
        architecture = transformers.AutoModelForImageClassification
        self.model = pretrained(architecture, model, types=("vit",), reward="safe", dtype=precision).to(device)
        self.to = self.model.to
        numbers = {name: number for number, name in self.model.config.id2label.items()}
        check_choice(f"safe: {model!r} has no label", label, numbers)
        self.label = numbers[label]
        self.processor = transformers.ViTImageProcessorPil.from_pretrained(model)
        logger.info("safe: %s of %s", label, model)

    def __call__(self, pil_images: list[Any]) -> list[float]:
        rows = [shown(pictures) for pictures in pil_images]
        chances = in_batches(self._chances, CHUNK, [picture for row in rows for picture in row])
        return [part.min().item() for part in torch.split(chances, [len(row) for row in rows])]

    @torch.no_grad()
    def _chances(self, pictures: list[Any]) -> torch.Tensor:
        pixels = self.processor(images=pictures, return_tensors="pt")["pixel_values"]
        logits: torch.Tensor = self.model(pixel_values=pixels.to(self.model.device, self.model.dtype)).logits
        return logits.float().softmax(-1)[:, self.label].cpu()
