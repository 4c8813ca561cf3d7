"""Reward: how much people would like a picture, whatever it shows: LAION's improved aesthetic predictor, version 2.

A linear head (five layers without activations) on the normalised image embedding of CLIP ViT-L/14, fitted to
ratings from 1 to 10 (github.com/christophschuhmann/improved-aesthetic-predictor).
"""

from __future__ import annotations

import hashlib
import logging

import torch

from genrl_rewards.models.checkpoints import fill, find, read_weights
from genrl_rewards.models.clip_model import load_clip
from genrl_rewards.models.pixels import frames, mean_over_frames

logger = logging.getLogger(__name__)

MODEL = "openai/clip-vit-large-patch14"
HEAD = "trl-lib/ddpo-aesthetic-predictor"
HEAD_FILES = ("sac+logos+ava1-l14-linearMSE.pth", "aesthetic-model.pth")
HEAD_SHA256 = "21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0"


class Head(torch.nn.Module):
    """D -> 1024 -> 128 -> 64 -> 16 -> 1 without activations: an affine map, kept as the published layers.

    ImageReward ends with the same head.
    """

    def __init__(self, width: int):
        super().__init__()
        sizes = (width, 1024, 128, 64, 16, 1)
        dropout_after = {0: 0.2, 1: 0.2, 2: 0.1}
        layers: list[torch.nn.Module] = []
        for i in range(5):
            layers.append(torch.nn.Linear(sizes[i], sizes[i + 1]))
            if i in dropout_after:
                layers.append(torch.nn.Dropout(dropout_after[i]))  # keeps the published numbering of the layers
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Embeddings [N, D] to scores [N]."""
        scores: torch.Tensor = self.layers(embeddings).squeeze(-1)
        return scores


def load_head(head: str, width: int) -> Head:
    """The predictor's head from a hub id, a folder or a file. Raises ValueError if it is for another CLIP."""
    file = find(head, HEAD_FILES, "aesthetic")
    module = Head(width)
    fill(module, read_weights(file), f"aesthetic: {file}")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    which = "the published one" if digest == HEAD_SHA256 else f"not the published one (sha256 {digest[:16]}...)"
    logger.info("aesthetic head %s: %s", file, which)
    return module.eval().requires_grad_(False)


class Aesthetic:
    """LAION's aesthetic predictor v2 on CLIP ViT-L/14: a rating of 1 to 10, usually 4.5 to 6.5; ignores the prompt.

    `model` hub id or folder of CLIP ViT-L/14 with its image processor, or `open_clip:MODEL`
    `head`  hub id, folder or file of the predictor's head
    `dtype` of CLIP: `float32` (default), `bfloat16`, `float16`

    A video gets the mean over its frames.
    """

    differentiable = True

    def __init__(self, model: str = MODEL, head: str = HEAD, dtype: str = "float32", device: str = "cpu"):
        self.scorer = load_clip(model, None, device, "aesthetic", dtype)
        self.head = load_head(head, self.scorer.width).to(device)

    def to(self, device: str) -> None:
        """Move both models."""
        self.scorer.to(device)
        self.head.to(device)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        embeddings = torch.nn.functional.normalize(self.scorer.embed_images(frames(images)), dim=-1)
        scores = self.head(embeddings.to(self.scorer.device)).to(images.device)
        return mean_over_frames(scores, images)
