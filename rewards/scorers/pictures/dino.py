"""Reward: how much the picture looks like a reference picture, by DINOv2 (arXiv 2304.07193) or DINOv3 (2508.10104).

`DinoFeatures` is the frozen, differentiable feature function that an adversarial reward shares.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from rewards.models.torchvision_compat import ensure

ensure()  # before transformers is imported for the first time

import transformers  # noqa: E402

from rewards.contract import nearest  # noqa: E402
from rewards.models.checkpoints import pretrained, torch_dtype  # noqa: E402
from rewards.models.pixels import crop_to, frames, from_pil, mean_over_frames, normalise  # noqa: E402

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

MODEL = "facebook/dinov2-base"
TYPES = ("dinov2", "dinov2_with_registers", "dinov3_vit")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, in all of them
TOKENS = ("class", "patches")
CHUNK = 16


class Features(NamedTuple):
    """`class_token` [B, D] and `patches` [B, N, D], N from left to right and top to bottom; after the last norm."""

    class_token: torch.Tensor
    patches: torch.Tensor


class DinoFeatures:
    """A frozen DINO as a function of pictures; its features are float32 whatever its `dtype`.

    `model` hub id or folder of a Dinov2Model, Dinov2WithRegistersModel or DINOv3ViTModel, weights in safetensors.
    `size`  side of the square that the model sees; a multiple of its patch (14 in version 2, 16 in version 3)
    """

    def __init__(
        self, model: str = MODEL, size: int = 224, device: str = "cpu", reward: str = "dino", dtype: str = "float32"
    ):
        precision = torch_dtype(dtype, reward)
        found = pretrained(transformers.AutoModel, model, types=TYPES, reward=reward, dtype=precision)
        self.model = found.to(device)
        config = self.model.config
        if size % config.patch_size:
            fits = round(size / config.patch_size) * config.patch_size
            raise ValueError(
                f"{reward}: size {size} is no multiple of the patch of {model}, {config.patch_size}: {fits}?"
            )
        # Registers stand between the class token and the patches, and are no patches.
        self.prefix = 1 + (0 if config.model_type == "dinov2" else config.num_register_tokens)
        self.size, self.width, self.device = size, config.hidden_size, device
        logger.info("DINO %s (%s) at %d pixels", model, config.model_type, size)

    def to(self, device: str) -> None:
        """Move the model."""
        self.model.to(device)
        self.device = device

    def features(self, images: torch.Tensor) -> Features:
        """Features of pictures [B, 3, H, W] in [0, 1], on the model's device; differentiable in the pictures.

        The shorter side becomes `size` (bicubic, antialiased), the central square is taken. Always on tensors and
        without rounding, so that features to train on and features to score on are the same function.
        """
        pixels = normalise(crop_to(images.to(self.device, torch.float32), self.size), MEAN, STD)
        tokens = self.model(pixel_values=pixels.to(self.model.dtype)).last_hidden_state.float()
        return Features(tokens[:, 0], tokens[:, self.prefix :])


def patch_similarity(patches: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Mean over the picture's patches [B, N, D] of the cosine with the most similar patch of [B, M, D]; [B].

    In [-1, 1]. Where a thing stands does not matter: each patch looks for its like anywhere in the reference.
    """
    unit, unit_reference = (torch.nn.functional.normalize(x, dim=-1) for x in (patches, reference))
    return (unit @ unit_reference.transpose(1, 2)).amax(2).mean(1)


class DinoSimilarity:
    """Likeness to the sample's own reference picture (column `reference_image`), a cosine in [-1, 1].

    `model`  hub id or folder of a DINOv2 (with registers or without) or DINOv3
    `tokens` `class` (default): cosine of the class tokens; `patches`: see `patch_similarity`
    `size`   side of the square that the model sees
    `dtype`  of the model: `float32` (default), `bfloat16`, `float16`

    Both are reported as parts. A video scores the mean over its frames.
    """

    differentiable = True

    def __init__(
        self,
        model: str = MODEL,
        tokens: str = "class",
        size: int = 224,
        dtype: str = "float32",
        device: str = "cpu",
    ):
        if tokens not in TOKENS:
            raise ValueError(f"dino: unknown tokens {tokens!r}.{nearest(tokens, TOKENS)} Known: {', '.join(TOKENS)}")
        self.tokens = tokens
        self.dino = DinoFeatures(model, size, device, "dino", dtype)

    def to(self, device: str) -> None:
        """Move the model."""
        self.dino.to(device)

    def __call__(
        self, images: torch.Tensor, reference_images: Sequence[Image]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = [(picture.size, picture.tobytes()) for picture in reference_images]
        distinct = {row: picture for row, picture in zip(rows, reference_images, strict=True)}
        known = {row: self._reference(picture) for row, picture in distinct.items()}  # once for a whole group
        pictures = frames(images)
        owners = [row for row in rows for _ in range(len(pictures) // len(rows))]
        similar = [
            self._similar(pictures[i : i + CHUNK], [known[row] for row in owners[i : i + CHUNK]])
            for i in range(0, len(pictures), CHUNK)
        ]
        parts = {
            name: mean_over_frames(torch.cat([pair[k] for pair in similar]), images).to(images.device)
            for k, name in enumerate(TOKENS)
        }
        return parts[self.tokens], parts

    @torch.no_grad()
    def _reference(self, picture: Image) -> Features:
        return self.dino.features(from_pil(picture))

    def _similar(self, pictures: torch.Tensor, references: list[Features]) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.dino.features(pictures)
        of_class = torch.cat([reference.class_token for reference in references])
        of_patches = torch.cat([reference.patches for reference in references])
        cosine = torch.nn.functional.cosine_similarity(found.class_token, of_class, dim=-1)
        return cosine, patch_similarity(found.patches, of_patches)
