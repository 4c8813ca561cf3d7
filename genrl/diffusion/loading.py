"""Loading a pipeline by the real loader of diffusers."""

from __future__ import annotations

import torch
from diffusers import DiffusionPipeline

from genrl.config import Model


def load_pipeline(model: Model) -> DiffusionPipeline:
    """The pipeline as diffusers loads it, from a folder or the hub; ValueError naming the key where it cannot."""
    try:
        return DiffusionPipeline.from_pretrained(
            model.path,
            revision=model.revision,
            variant=model.variant,
            dtype=getattr(torch, model.dtype),
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: {model.path!r} could not be loaded as a diffusers pipeline: {error}") from error
