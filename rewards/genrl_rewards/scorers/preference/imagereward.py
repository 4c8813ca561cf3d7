"""Reward: human preference, by ImageReward (Xu et al. 2023, arXiv 2304.05977).

A BLIP whose text encoder reads the prompt while attending to the picture, and a linear head on its first token. The
authors' package does not import together with transformers 5; transformers' own BLIP modules compute the same.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Resampling

from genrl_rewards.models import pixels
from genrl_rewards.models.checkpoints import (
    fill,
    find,
    no_init_weights,
    read_weights,
    renamed,
    tokenizer_of,
    torch_dtype,
    transformers,
)
from genrl_rewards.pictures import pil_list
from genrl_rewards.scorers.preference.aesthetic import Head

logger = logging.getLogger(__name__)

MODEL = "THUDM/ImageReward"
TOKENIZER = "google-bert/bert-base-uncased"
FILES = ("ImageReward.safetensors", "ImageReward.pt")
TOKENS = 35  # longer prompts are cut
HEAD_WIDTH = 64  # of an attention head of BLIP's ViT of any size
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the raw score over the authors' data
CHUNK = 16  # pictures per forward pass, to bound memory

MED_KEYS = (  # of med_config.json, which are transformers' names, too
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "layer_norm_eps"),
)

NAMES = {  # from the checkpoint's names (timm's in the picture encoder) to those of transformers' BLIP modules
    r"^blip\.visual_encoder\.": "vision.",
    r"^blip\.text_encoder\.": "text.",
    r"^mlp\.": "head.",
    r"^vision\.cls_token$": "vision.embeddings.class_embedding",
    r"^vision\.pos_embed$": "vision.embeddings.position_embedding",
    r"^vision\.patch_embed\.proj\.": "vision.embeddings.patch_embedding.",
    r"^vision\.norm\.": "vision.post_layernorm.",
    r"^vision\.blocks\.(\d+)\.": r"vision.encoder.layers.\1.",
    r"^(vision\.encoder\.layers\.\d+)\.norm([12])\.": r"\1.layer_norm\2.",
    r"\.attn\.qkv\.": ".self_attn.qkv.",
    r"\.attn\.proj\.": ".self_attn.projection.",
}
USED = ("blip.visual_encoder.", "blip.text_encoder.", "mlp.")
CONSTANT = "blip.text_encoder.embeddings.position_ids"


class ImageRewardModel(torch.nn.Module):
    """Picture encoder, text encoder with cross-attention, and head."""

    def __init__(self, vision: Any, text: Any):
        super().__init__()
        self.vision = transformers.BlipVisionModel(vision)
        self.text = transformers.BlipTextModel(text, add_pooling_layer=False)
        self.head = Head(text.hidden_size)

    def forward(self, pixels: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """pixels [N, 3, S, S], tokens and mask [N, 35]; standardised scores [N]."""
        picture = self.vision(pixel_values=pixels.to(self.vision.dtype)).last_hidden_state
        visible = torch.ones(picture.shape[:2], dtype=torch.long, device=picture.device)
        text = self.text(
            input_ids=tokens, attention_mask=mask, encoder_hidden_states=picture, encoder_attention_mask=visible
        ).last_hidden_state
        scores: torch.Tensor = (self.head(text[:, 0].float()) - MEAN) / STD
        return scores


def build(weights: Mapping[str, torch.Tensor], med: Mapping[str, Any], what: str) -> ImageRewardModel:
    """The model for a checkpoint, with its weights; `med` is med_config.json. Raises ValueError if they do not fit."""
    used = {name: value.float() for name, value in weights.items() if name.startswith(USED) and name != CONSTANT}
    patches, positions = "blip.visual_encoder.patch_embed.proj.weight", "blip.visual_encoder.pos_embed"
    if not {patches, positions, "mlp.layers.0.weight"} <= set(used):
        raise ValueError(
            f"{what} is not an ImageReward: it lacks {patches} or mlp.layers.0.weight; it has {list(used)[:3]}"
        )
    width, _, patch, _ = used[patches].shape
    # Read off the weights: the published folder has a configuration of the text encoder alone.
    layers = len({name.split(".")[3] for name in used if name.startswith("blip.visual_encoder.blocks.")})
    vision = transformers.BlipVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_WIDTH,
        image_size=round((used[positions].shape[1] - 1) ** 0.5) * patch,
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    text = transformers.BlipTextConfig(
        **{key: med[key] for key in MED_KEYS},
        encoder_hidden_size=width,
        is_decoder=True,  # gives the layers their cross-attention; the mask is causal only on request
    )
    with no_init_weights():
        model = ImageRewardModel(vision, text)
    fill(model, {renamed(name, NAMES): value for name, value in used.items()}, what)
    return model.eval().requires_grad_(False)


def prepare(images: torch.Tensor, size: int) -> torch.Tensor:
    """Shorter side to `size` (bicubic), the central square, CLIP's mean and standard deviation; [N, 3, size, size].

    Resized by Pillow in 8 bits, as the authors do, or on tensors where gradients are wanted.
    """
    height, width = pixels.shortest_side(images.shape[-2], images.shape[-1], size)
    if pixels.wants_gradients(images):
        resized = pixels.resize(images, height, width).clamp(0, 1)
    else:
        pictures = [picture.resize((width, height), Resampling.BICUBIC) for picture in pil_list(images)]
        resized = torch.cat([pixels.from_pil(picture) for picture in pictures]).to(images.device)
    square = pixels.central(resized, size, round)  # by torchvision, which the authors use
    return pixels.normalise(square, pixels.OPENAI_MEAN, pixels.OPENAI_STD)


class ImageReward:
    """Human preference for the prompt: ImageReward v1.0, standardised, about -2.3 to 2.

    `model`     hub id or folder with ImageReward.pt (or the same as safetensors) and med_config.json
    `tokenizer` hub id or folder of BERT's uncased tokenizer. Prompts are cut at 35 tokens
    `dtype`     of the two encoders: `float32` (default), `bfloat16`, `float16`

    A video gets the mean over its frames.
    """

    differentiable = True

    def __init__(self, model: str = MODEL, tokenizer: str = TOKENIZER, dtype: str = "float32", device: str = "cpu"):
        file = find(model, FILES, "imagereward")
        folder = str(file.parent) if Path(model).exists() else model
        med = json.loads(find(folder, ["med_config.json"], "imagereward").read_text(encoding="utf-8"))
        precision = torch_dtype(dtype, "imagereward")
        self.model = build(read_weights(file), med, f"imagereward: {file}").to(device)
        self.to = self.model.to
        encoders: tuple[torch.nn.Module, ...] = (self.model.vision, self.model.text)
        for encoder in encoders:
            encoder.to(precision)
        self.tokenizer = tokenizer_of(tokenizer, "imagereward")
        self.size: Any = self.model.vision.config.image_size
        logger.info("ImageReward from %s", file)

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        text = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        tokens, mask = (pixels.once_per_frame(text[key], images) for key in ("input_ids", "attention_mask"))
        scores = pixels.in_batches(self._score, CHUNK, pixels.frames(images), tokens, mask)
        return pixels.mean_over_frames(scores, images).to(images.device)

    def _score(self, pictures: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        device = self.model.vision.device
        scores: torch.Tensor = self.model(prepare(pictures, self.size).to(device), tokens.to(device), mask.to(device))
        return scores
