"""Reward: how much the picture looks like a reference picture, by DINOv2 (arXiv 2304.07193) or DINOv3 (2508.10104).

`DinoFeatures` is the frozen, differentiable feature function; the adversarial reward uses it, too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL.Image import Image

from genrl_rewards.contract import check_choice
from genrl_rewards.models.checkpoints import pretrained, torch_dtype, transformers
from genrl_rewards.models.pixels import crop_to, frames, from_pil, in_batches, mean_over_frames, normalise

logger = logging.getLogger(__name__)

MODEL = "facebook/dinov2-base"
TYPES = ("dinov2", "dinov2_with_registers", "dinov3_vit")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, for all of them
TOKENS = ("class", "patches")
PAPERS_SIZE = 518  # pixels: DINOv2's own, and what Adv-GRPO shows to it
CHUNK = 16  # pictures per forward pass, to bound memory


class Features(NamedTuple):
    """`class_token` [B, D] and `patches` [B, N, D], N from left to right and top to bottom, after the last norm."""

    class_token: torch.Tensor
    patches: torch.Tensor


class DinoFeatures:
    """A frozen DINO as a function of pictures; its features are float32 for every `dtype`.

    `model` hub id or folder of a Dinov2Model, Dinov2WithRegistersModel or DINOv3ViTModel, weights in safetensors.
    `size`  side in pixels of the square that the model sees; a multiple of its patch (14 in version 2, 16 in version
            3); None: the one nearest 518, which is 518 or 512
    Raises ValueError for another size, and for a checkpoint of another architecture or with missing weights.
    """

    def __init__(
        self,
        model: str = MODEL,
        size: int | None = 224,
        device: str = "cpu",
        reward: str = "dino",
        dtype: str = "float32",
    ):
        precision = torch_dtype(dtype, reward)
        self.model = pretrained(transformers.AutoModel, model, types=TYPES, reward=reward, dtype=precision).to(device)
        self.to = self.model.to
        config = self.model.config
        fits = round((size or PAPERS_SIZE) / config.patch_size) * config.patch_size
        size = fits if size is None else size
        if size != fits:
            raise ValueError(
                f"{reward}: size {size} is not a multiple of the patch of {model}, {config.patch_size}: {fits}?"
            )
        # Registers are between the class token and the patches, and are not patches.
        self.prefix = 1 + (0 if config.model_type == "dinov2" else config.num_register_tokens)
        self.size, self.width = size, config.hidden_size
        logger.info("DINO %s (%s) at %d pixels", model, config.model_type, size)

    def features(self, images: torch.Tensor) -> Features:
        """Features of pictures [B, 3, H, W] in [0, 1], on the model's device; differentiable in the pictures.

        The shorter side becomes `size` (bicubic, antialiased), then the central square is cut out: always on tensors
        and without rounding, so that features for training and features for scoring are the same function.
        """
        tokens = self.model(pixel_values=self._pixels(images)).last_hidden_state.float()
        return Features(tokens[:, 0], tokens[:, self.prefix :])

    def patches_after(self, blocks: Sequence[int], images: torch.Tensor) -> list[torch.Tensor]:
        """Patches [B, N, D] as each of these transformer blocks leaves them (0: the first), before any last norm."""
        states = self.model(pixel_values=self._pixels(images), output_hidden_states=True).hidden_states
        return [states[1 + block][:, self.prefix :].float() for block in blocks]  # states[0] goes into the first

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        pixels = normalise(crop_to(images.to(self.model.device, torch.float32), self.size), MEAN, STD)
        return pixels.to(self.model.dtype)


def patch_similarity(patches: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Mean over the picture's patches [B, N, D] of the cosine with the most similar patch of [B, M, D]; [B].

    In [-1, 1]. Positions do not matter: each patch is compared with all patches of the reference.
    """
    unit, unit_reference = (torch.nn.functional.normalize(x, dim=-1) for x in (patches, reference))
    return (unit @ unit_reference.transpose(1, 2)).amax(2).mean(1)


class Diversity:
    """How different a picture is from the others of its group: 1 - the mean cosine of DINO's class tokens, in [0, 2].

    A monitor, with weight 0: it falls where a policy comes to draw one picture for all noises. Groupwise; no score for
    a group of one, so evaluation needs `group_size: 2` or more. Of a video, the tokens are averaged over its frames.

    `model`, `size`, `dtype` as in `dino`
    """

    def __init__(self, model: str = MODEL, size: int = 224, dtype: str = "float32", device: str = "cpu"):
        self.dino = DinoFeatures(model, size, device, "diversity", dtype)
        self.to = self.dino.to

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, group: list[int]) -> torch.Tensor:
        tokens = in_batches(lambda pictures: self.dino.features(pictures).class_token, CHUNK, frames(images))
        unit = torch.nn.functional.normalize(tokens.view(len(images), -1, tokens.shape[-1]).mean(1), dim=-1)
        groups = torch.tensor(group, device=unit.device)
        readable = ~unit.isnan().any(
            1
        )  # a picture that could not be decoded has no score, the others of its group have
        same = (groups[:, None] == groups) & readable & ~torch.eye(len(groups), dtype=torch.bool, device=unit.device)
        others = same.sum(1)  # 0 / 0 for a group of one: no score
        alike = torch.where(same, unit @ unit.T, 0.0).sum(1) / others
        return (1 - alike).where(readable & (others > 0), torch.nan).to(images.device)


class DinoSimilarity:
    """Similarity to the sample's reference picture: cosine of DINOv2's or DINOv3's tokens, in [-1, 1].

    The reference is the file in the column `reference_image`.

    `model`  hub id or folder of a DINOv2 (with registers or without) or DINOv3
    `tokens` `class` (default): cosine of the class tokens; `patches`: see `patch_similarity`
    `size`   side in pixels of the square that the model sees
    `dtype`  of the model: `float32` (default), `bfloat16`, `float16`

    Both cosines are reported as parts. A video gets the mean over its frames.
    """

    differentiable = True

    def __init__(
        self, model: str = MODEL, tokens: str = "class", size: int = 224, dtype: str = "float32", device: str = "cpu"
    ):
        check_choice("dino: unknown tokens", tokens, TOKENS)
        self.tokens = tokens
        self.dino = DinoFeatures(model, size, device, "dino", dtype)
        self.to = self.dino.to

    def __call__(
        self, images: torch.Tensor, reference_images: list[Image]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = [(picture.size, picture.tobytes()) for picture in reference_images]
        distinct = {row: picture for row, picture in zip(rows, reference_images, strict=True)}
        known = {row: self._reference(picture) for row, picture in distinct.items()}  # once for a whole group
        pictures = frames(images)
        references = [known[row] for row in rows for _ in range(len(pictures) // len(rows))]
        both = in_batches(self._similar, CHUNK, pictures, references).T.contiguous()
        parts = {
            name: mean_over_frames(similar, images).to(images.device)
            for name, similar in zip(TOKENS, both, strict=True)
        }
        return parts[self.tokens], parts

    @torch.no_grad()
    def _reference(self, picture: Image) -> Features:
        return self.dino.features(from_pil(picture))

    def _similar(self, pictures: torch.Tensor, references: list[Features]) -> torch.Tensor:
        """Both cosines of pictures [B, 3, H, W] with their references, [B, 2]."""
        features = self.dino.features(pictures)
        of_class = torch.cat([reference.class_token for reference in references])
        of_patches = torch.cat([reference.patches for reference in references])
        cosine = torch.nn.functional.cosine_similarity(features.class_token, of_class, dim=-1)
        return torch.stack([cosine, patch_similarity(features.patches, of_patches)], dim=1)
