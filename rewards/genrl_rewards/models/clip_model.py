"""CLIP as a scorer: embeddings of pictures and prompts, with fixed preprocessing.

The image processor's backend changes scores: transformers uses torchvision's resize if torchvision imports and Pillow's
otherwise, with the same saved configuration. Here it is always Pillow's (bicubic, antialiased), with which the
checkpoints were made, and the log says so. Where a score is to be differentiated, the same steps are done on tensors,
without rounding the resized picture to 8 bits.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import PIL
import torch
from PIL.Image import Resampling

from genrl_rewards.extras import install
from genrl_rewards.models import pixels
from genrl_rewards.models.checkpoints import pretrained, tokenizer_of, torch_dtype, transformers
from genrl_rewards.pictures import pil_list

if TYPE_CHECKING:
    from genrl_rewards.models.open_clip_model import OpenClipScorer

logger = logging.getLogger(__name__)

CHUNK = 32  # pictures or prompts per forward pass, to bound memory
OPEN_CLIP = "open_clip:"


def load_clip(
    model: str, processor: str | None, device: str, reward: str, dtype: str = "float32"
) -> ClipScorer | OpenClipScorer:
    """A CLIP by its name: `open_clip:MODEL` in open_clip's format (see `OpenClipScorer`), else in transformers'.

    `processor`, a hub id or folder, is for transformers' alone; None: that of `model`. Raises ValueError as the two
    do, for a processor beside open_clip's own, and without the package.
    """
    if not model.startswith(OPEN_CLIP):
        return ClipScorer(model, processor or model, device, reward, dtype)
    if importlib.util.find_spec("open_clip") is None:
        raise ValueError(f"{reward}: {model!r} needs open_clip, which is not installed: {install('clip')}")
    if processor is not None:
        raise ValueError(f"{reward}: {model!r} has its own tokenizer and preparation: leave processor out")
    from genrl_rewards.models.open_clip_model import OpenClipScorer

    return OpenClipScorer(model.removeprefix(OPEN_CLIP), device, reward, dtype)


def cosine(image_embeds: torch.Tensor, text_embeds: torch.Tensor) -> torch.Tensor:
    """Row-wise cosine of two sets of embeddings [N, D], in [-1, 1]; [N]."""
    return torch.nn.functional.cosine_similarity(image_embeds, text_embeds, dim=-1)


def cosines_with_prompts(image_embeds: torch.Tensor, text_embeds: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Cosines of the embeddings of all frames of `images` with those of N prompts [N, D], mean over frames; [N]."""
    texts = pixels.once_per_frame(text_embeds, images).to(image_embeds.device)
    return pixels.mean_over_frames(cosine(image_embeds, texts), images).to(images.device)


class ClipScorer:
    """A `transformers.CLIPModel` with its tokenizer and image processor.

    `model` and `processor` are hub ids or local folders in the Hugging Face format, weights in safetensors. `dtype` is
    that of the towers; embeddings and the logit scale are float32 in any case. `reward` is named in errors.
    Raises ValueError for a checkpoint of another architecture, an empty folder, missing weights.
    """

    def __init__(self, model: str, processor: str, device: str, reward: str = "clip", dtype: str = "float32"):
        clip = pretrained(transformers.CLIPModel, model, types=("clip",), reward=reward)
        # Before the cast: of the logarithm in bfloat16 it would be 98.9 instead of 100.
        self.logit_scale = math.exp(clip.logit_scale.item())
        """exp of the checkpoint's logit scale; 100 in the published ones."""
        self.model = clip.to(device, torch_dtype(dtype, reward))
        self.to, self.reward = self.model.to, reward
        self.width: int = clip.config.projection_dim
        """D, of the embeddings."""
        self.tokenizer = tokenizer_of(processor, "clip")
        self.image_processor: Any = transformers.CLIPImageProcessorPil.from_pretrained(processor)
        backend = type(self.image_processor).__name__
        versions = f"transformers {transformers.__version__}, Pillow {PIL.__version__}"
        logger.info("CLIP %s, images by %s of %s, %s", model, backend, processor, versions)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        device: torch.device = self.model.device
        return device

    def cosines(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Cosine of each of N pictures with its prompt, float32 [N] on the device of the images.

        A video [N, F, 3, H, W] gets the mean over its frames. Differentiable in the images.
        """
        return cosines_with_prompts(self.embed_images(pixels.frames(images)), self.embed_texts(prompts), images)

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        """Projected embeddings of pictures [N, 3, H, W] in [0, 1], not normalised, float32 [N, D]."""
        return pixels.in_batches(self._embed_images, CHUNK, images).to(images.device)

    @torch.no_grad()
    def embed_texts(self, prompts: Sequence[str]) -> torch.Tensor:
        """Projected embeddings of N prompts, cut to the model's 77 tokens, float32 [N, D] on the CPU."""
        return embed_texts(self.model, self.tokenizer, prompts)

    def _embed_images(self, images: torch.Tensor) -> torch.Tensor:
        prepared = self.prepare(images).to(self.model.device, self.model.dtype)
        return projected(self.model.get_image_features(pixel_values=prepared)).float()

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """The model's input for pictures [N, 3, H, W]: by Pillow, or on tensors where gradients are wanted."""
        processor = self.image_processor
        if pixels.wants_gradients(images):
            side = processor.crop_size["height"]
            given = dict(processor.size), processor.crop_size["width"], processor.resample, processor.rescale_factor
            steps = [getattr(processor, f"do_{step}") for step in ("resize", "center_crop", "rescale", "normalize")]
            if given != ({"shortest_edge": side}, side, Resampling.BICUBIC, 1 / 255) or not all(steps):
                raise ValueError(
                    f"{self.reward}: no gradients through a preparation other than bicubic to the central square of "
                    f"the shorter side: {processor}"
                )
            square = pixels.crop_to(images, side)
            return pixels.normalise(square, processor.image_mean, processor.image_std)
        prepared: torch.Tensor = processor(images=pil_list(images), return_tensors="pt")["pixel_values"]
        return prepared


def embed_texts(model: Any, tokenizer: Any, prompts: Sequence[str]) -> torch.Tensor:
    """Projected embeddings of N prompts by a CLIPModel, cut to the tokens that it takes, float32 [N, D] on the CPU."""
    limit = model.config.text_config.max_position_embeddings

    def encode(texts: list[str]) -> torch.Tensor:
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt").to(model.device)
        return projected(model.get_text_features(tokens["input_ids"], tokens["attention_mask"]))

    return distinct_texts(encode, prompts)


def distinct_texts(encode: Callable[[list[str]], torch.Tensor], prompts: Sequence[str]) -> torch.Tensor:
    """`encode` of N prompts, float32 [N, D] on the CPU. One that occurs several times (a group's) is encoded once."""
    distinct = list(dict.fromkeys(prompts))
    embeds = pixels.in_batches(lambda texts: encode(texts).float().cpu(), CHUNK, distinct)
    return embeds[[distinct.index(prompt) for prompt in prompts]]


def projected(features: Any) -> torch.Tensor:
    """The projected embeddings [N, D] in what `get_image_features` and `get_text_features` return.

    Their `pooler_output` is *already* projected; projecting it again is silently wrong where the widths agree.
    """
    embeds: torch.Tensor = features.pooler_output
    return embeds
