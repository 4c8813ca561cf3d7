"""CLIP as a scorer: embeddings of pictures and prompts, with the preprocessing pinned.

The image processor's backend changes scores: transformers 5 takes torchvision's resize where torchvision imports
and Pillow's elsewhere, with the same saved configuration. Here it is always Pillow's (bicubic, antialiased), which
is what the checkpoints were made with, and the run's log says so. Where a score is to be differentiated, the same
steps are done on tensors, without rounding the resized picture to 8 bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import PIL
import torch

from rewards.models.torchvision_compat import ensure

ensure()  # before transformers is imported for the first time

import transformers  # noqa: E402

from rewards.contract import to_pil  # noqa: E402
from rewards.models.checkpoints import pretrained, torch_dtype  # noqa: E402
from rewards.models.pixels import crop_to, frames, mean_over_frames, normalise, wants_gradients  # noqa: E402

logger = logging.getLogger(__name__)

CHUNK = 32  # pictures or prompts per forward, to bound memory


def cosine(image_embeds: torch.Tensor, text_embeds: torch.Tensor) -> torch.Tensor:
    """Row-wise cosine of two sets of embeddings [N, D], in [-1, 1]; [N]."""
    return torch.nn.functional.cosine_similarity(image_embeds, text_embeds, dim=-1)


class ClipScorer:
    """A `transformers.CLIPModel` with its tokenizer and image processor.

    `model` and `processor` are hub ids or local folders in the Hugging Face format, weights in safetensors. `dtype` is
    that of the towers; embeddings and the logit scale are float32 whatever it is.
    `reward` is named in errors: ValueError for a checkpoint of another architecture, an empty folder, missing weights.
    """

    def __init__(self, model: str, processor: str, device: str, reward: str = "clip", dtype: str = "float32"):
        clip = pretrained(transformers.CLIPModel, model, types=("clip",), reward=reward)
        self.logit_scale = math.exp(clip.logit_scale.item())
        """exp of the checkpoint's logit scale; 100 in the published ones."""
        self.model = clip.to(device, torch_dtype(dtype, reward))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(processor)
        self.image_processor = _pil_image_processor().from_pretrained(processor)
        self.device = device
        backend = type(self.image_processor).__name__
        versions = f"transformers {transformers.__version__}, Pillow {PIL.__version__}"
        logger.info("CLIP %s, images by %s of %s, %s", model, backend, processor, versions)

    def to(self, device: str) -> None:
        """Move the model."""
        self.model.to(device)
        self.device = device

    def cosines(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Cosine of each of N pictures and its prompt, float32 [N] on the device of the images.

        A video [N, F, 3, H, W] is the mean of its frames. Differentiable in the images.
        """
        texts = self.embed_texts(prompts).to(images.device)
        pictures = self.embed_images(frames(images))
        per_prompt = len(pictures) // max(len(texts), 1)
        return mean_over_frames(cosine(pictures, texts.repeat_interleave(per_prompt, 0)), images)

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        """Projected embeddings of pictures [N, 3, H, W] in [0, 1], not normalised, float32 [N, D]."""
        return torch.cat([self._embed_images(chunk) for chunk in _chunks(images)]).to(images.device)

    @torch.no_grad()
    def embed_texts(self, prompts: Sequence[str]) -> torch.Tensor:
        """Projected embeddings of N prompts, cut to the model's 77 tokens, float32 [N, D] on the CPU."""
        return embed_texts(self.model, self.tokenizer, prompts)

    def _embed_images(self, images: torch.Tensor) -> torch.Tensor:
        pixels = self.prepare(images).to(self.device, self.model.dtype)
        return projected(self.model.get_image_features(pixel_values=pixels)).float()

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """The model's input for pictures [N, 3, H, W]: by Pillow, or on tensors where gradients are wanted."""
        processor = self.image_processor
        if wants_gradients(images):
            return normalise(crop_to(images, processor.crop_size["height"]), processor.image_mean, processor.image_std)
        return processor(images=to_pil(images), return_tensors="pt")["pixel_values"]


def embed_texts(model: Any, tokenizer: Any, prompts: Sequence[str]) -> torch.Tensor:
    """Projected embeddings of N prompts by a CLIPModel, cut to what it takes, float32 [N, D] on the CPU.

    A prompt that occurs several times (a group has the same one) is encoded once.
    """
    distinct = list(dict.fromkeys(prompts))
    limit = model.config.text_config.max_position_embeddings
    rows = []
    for chunk in _chunks(distinct):
        tokens = tokenizer(list(chunk), padding=True, truncation=True, max_length=limit, return_tensors="pt").to(
            model.device
        )
        rows.append(projected(model.get_text_features(tokens["input_ids"], tokens["attention_mask"])).float().cpu())
    return torch.cat(rows)[[distinct.index(prompt) for prompt in prompts]]


def projected(features: Any) -> torch.Tensor:
    """The projected embedding in what `get_image_features` and `get_text_features` return.

    transformers 4 returns the tensor; transformers 5 an output whose `pooler_output` is *already* projected
    (projecting it again is silently wrong where the widths agree).
    """
    return features if isinstance(features, torch.Tensor) else features.pooler_output


def _pil_image_processor() -> Any:
    """The class that resizes with Pillow: named so in transformers 5, the plain one in transformers 4."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return transformers.CLIPImageProcessorPil
    return transformers.CLIPImageProcessor


def _chunks(rows: Any) -> Iterator[Any]:
    return (rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK))
