"""A CLIP in open_clip's format as a scorer: found, built, loaded, tokenised and prepared for by open_clip itself."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from genrl_rewards.contract import nearest
from genrl_rewards.models import pixels
from genrl_rewards.models.checkpoints import HUB_ID, torch_dtype
from genrl_rewards.models.clip_model import CHUNK, cosines_with_prompts, distinct_texts
from genrl_rewards.models.torchvision_compat import ensure
from genrl_rewards.pictures import pil_list

ensure()  # before open_clip imports torchvision

import open_clip  # noqa: E402
from open_clip.transform import PreprocessCfg, image_transform_v2  # noqa: E402

logger = logging.getLogger(__name__)


class OpenClipScorer:
    """A model of open_clip with its tokenizer and its preparation of pictures; the members are those of `ClipScorer`.

    `model` is `ARCHITECTURE/TAG` (a published checkpoint, `open_clip.list_pretrained()`), `ARCHITECTURE/path/to/file`,
    a folder or a hub id with `open_clip_config.json`. Nothing is unpickled. Embeddings and the logit scale are float32
    whatever `dtype` is. Raises ValueError if open_clip cannot load it, naming `reward`.
    """

    def __init__(self, model: str, device: str, reward: str, dtype: str = "float32"):
        name, weights = locate(model, reward)
        try:
            clip: Any = open_clip.create_model(name, weights, pretrained_text=False, require_pretrained=True)
            self.tokenizer: Any = open_clip.get_tokenizer(name)
        except (RuntimeError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())[:400]
            raise ValueError(f"{reward}: open_clip cannot load {model!r}: {reason}") from error
        self.logit_scale = math.exp(clip.logit_scale.item())
        """exp of the checkpoint's logit scale; 100 in most of the published ones."""
        self.model = clip.eval().requires_grad_(False).to(device, torch_dtype(dtype, reward))
        self.to = self.model.to
        self.width = len(self.embed_texts([""])[0])
        """D, of the embeddings."""
        self.preparation = PreprocessCfg(**clip.visual.preprocess_cfg)
        self.transform = image_transform_v2(self.preparation, is_train=False)
        logger.info("open_clip %s: %s, %s", open_clip.__version__, model, self.preparation)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def cosines(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Cosine of each of N pictures, or the mean over frames [N, F, 3, H, W], with its prompt, float32 [N]."""
        return cosines_with_prompts(self.embed_images(pixels.frames(images)), self.embed_texts(prompts), images)

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        """Projected embeddings of pictures [N, 3, H, W] in [0, 1], not normalised, float32 [N, D]."""
        return pixels.in_batches(lambda some: self.embed_prepared(self.prepare(some)), CHUNK, images).to(images.device)

    @torch.no_grad()
    def embed_texts(self, prompts: Sequence[str]) -> torch.Tensor:
        """Projected embeddings of N prompts, cut to the tokens that the model takes, float32 [N, D] on the CPU."""
        return distinct_texts(lambda texts: self.model.encode_text(self.tokenizer(texts).to(self.device)), prompts)

    def embed_prepared(self, prepared: torch.Tensor) -> torch.Tensor:
        """Projected embeddings of what the model takes, [N, 3, side, side]; float32 [N, D] on the model's device."""
        embeds: torch.Tensor = self.model.encode_image(prepared.to(self.device, next(self.model.parameters()).dtype))
        return embeds.float()

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """The model's input for pictures [N, 3, H, W]: by open_clip, or on tensors where gradients are wanted."""
        if not pixels.wants_gradients(images):
            return torch.stack([self.transform(picture) for picture in pil_list(images)])
        how = self.preparation
        side = how.size if isinstance(how.size, int) else how.size[0]
        square = how.size in (side, (side, side), [side, side])
        if how.interpolation != "bicubic" or how.fill_color or not square:
            raise ValueError(f"open_clip: no gradients through a preparation other than bicubic to a square: {how}")
        if how.resize_mode == "shortest":
            resized = pixels.crop_to(images, side, round)  # as torchvision
        elif how.resize_mode == "longest":
            resized = pixels.pad_to(images, side)
        else:
            resized = pixels.resize(images, side, side).clamp(0, 1)
        return pixels.normalise(resized, how.mean, how.std)


def locate(model: str, reward: str) -> tuple[str, str | None]:
    """The two names by which open_clip finds a model: an architecture and its weights, or one with a schema alone.

    Raises ValueError for what is none of those, a tag that the architecture does not have, and a file or folder that
    is not there.
    """
    if Path(model).is_dir():
        return f"local-dir:{model}", None
    name, _, weights = model.partition("/")
    available = open_clip.list_models()
    if name in available:
        tags = open_clip.list_pretrained_tags_by_model(name)
        if weights in tags or Path(weights).is_file():
            return name, weights
        raise ValueError(
            f"{reward}: {model!r}: {weights!r} is neither a file nor a checkpoint of {name} that open_clip knows."
            f"{nearest(weights, tags)} Known: {', '.join(tags) or 'none'}"
        )
    if HUB_ID.fullmatch(model):
        return f"hf-hub:{model}", None
    raise ValueError(
        f"{reward}: {model!r} is neither a folder (looked from {Path.cwd()}) nor a hub id nor ARCHITECTURE/WEIGHTS of "
        f"open_clip.{nearest(name, available)}"
    )
