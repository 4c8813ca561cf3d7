"""CLIP as a scorer: embeddings of pictures and prompts, with the preprocessing pinned.

The image processor's backend changes scores: transformers 5 takes torchvision's resize where torchvision imports
and Pillow's elsewhere, with the same saved configuration. Here it is always Pillow's (bicubic, antialiased), which
is what the checkpoints were made with, and the run's log says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import PIL
import torch

from rewards.torchvision_compat import ensure

ensure()  # before transformers is imported for the first time

import transformers  # noqa: E402

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

Pictures: TypeAlias = "Sequence[Image] | Sequence[Sequence[Image]]"

CHUNK = 32  # pictures or prompts per forward, to bound memory


def cosine(image_embeds: torch.Tensor, text_embeds: torch.Tensor) -> torch.Tensor:
    """Row-wise cosine of two sets of embeddings [N, D], in [-1, 1]; [N]."""
    return torch.nn.functional.cosine_similarity(image_embeds, text_embeds, dim=-1)


class ClipScorer:
    """A `transformers.CLIPModel` in float32 with its tokenizer and image processor.

    `model` and `processor` are hub ids or local folders in the Hugging Face format, weights in safetensors.
    """

    def __init__(self, model: str, processor: str, device: str):
        clip: Any = transformers.CLIPModel.from_pretrained(model, dtype=torch.float32, use_safetensors=True)
        self.model = clip.eval().requires_grad_(False).to(device)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(processor)
        self.image_processor = _pil_image_processor().from_pretrained(processor)
        self.device = device
        backend = type(self.image_processor).__name__
        versions = f"transformers {transformers.__version__}, Pillow {PIL.__version__}"
        logger.info("CLIP %s, images by %s of %s, %s", model, backend, processor, versions)

    @property
    def logit_scale(self) -> float:
        """exp of the checkpoint's logit scale; 100 in the published ones."""
        return math.exp(self.model.logit_scale.item())

    def cosines(self, pictures: Pictures, prompts: Sequence[str]) -> torch.Tensor:
        """Cosine of each of N pictures and its prompt, float32 [N] on the CPU; a video is the mean of its frames."""
        rows = [[p] if not isinstance(p, Sequence) else list(p) for p in pictures]
        texts = self.embed_texts(prompts)
        images = self.embed_images([frame for row in rows for frame in row])
        owner = torch.tensor([i for i, row in enumerate(rows) for _ in row])
        per_frame = cosine(images, texts[owner])
        sums = torch.zeros(len(rows)).index_add(0, owner, per_frame)
        return sums / torch.tensor([len(row) for row in rows])

    @torch.no_grad()
    def embed_images(self, pictures: Sequence[Image]) -> torch.Tensor:
        """Projected embeddings of N pictures, not normalised, float32 [N, D] on the CPU."""
        return torch.cat([self._embed_images(chunk) for chunk in _chunks(pictures)])

    @torch.no_grad()
    def embed_texts(self, prompts: Sequence[str]) -> torch.Tensor:
        """Projected embeddings of N prompts, cut to the model's 77 tokens, float32 [N, D] on the CPU.

        A prompt that occurs several times (a group has the same one) is encoded once.
        """
        distinct = list(dict.fromkeys(prompts))
        embeds = torch.cat([self._embed_texts(chunk) for chunk in _chunks(distinct)])
        return embeds[[distinct.index(prompt) for prompt in prompts]]

    def _embed_images(self, pictures: Sequence[Image]) -> torch.Tensor:
        pixels = self.image_processor(images=list(pictures), return_tensors="pt")["pixel_values"]
        return projected(self.model.get_image_features(pixel_values=pixels.to(self.device))).float().cpu()

    def _embed_texts(self, prompts: Sequence[str]) -> torch.Tensor:
        limit = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(list(prompts), padding=True, truncation=True, max_length=limit, return_tensors="pt").to(
            self.device
        )
        features = self.model.get_text_features(tokens["input_ids"], tokens["attention_mask"])
        return projected(features).float().cpu()


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


def _chunks(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK))
