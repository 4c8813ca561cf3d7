"""Orient-Anything (arXiv 2412.18605): how the thing in a picture is turned in space, from DINOv2's class token.

The network gives one score per degree of each angle. The published file holds the weights of DINOv2 (`dinov2.`) and of
two layers with batch norms on its class token (`down_sampler.`), of which the last has 360 outputs for the azimuth, 180
for the polar angle, 180 or 360 for the rotation, and 2 for whether the thing has a front at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor, nn

from genrl_rewards.models.checkpoints import fill, find, read_weights, transformers

MODEL = "Viglong/Orient-Anything"
BACKBONE = "facebook/dinov2-large"
FILES = ("croplargeEX2/dino_weight.pt", "dino_weight.pt")
AZIMUTHS, POLARS, FRONT = 360, 180, 2  # outputs


class Orientation(NamedTuple):
    """Degrees, and the probability that the thing has a front, without which they mean nothing."""

    azimuth: float
    """Around the vertical, in [0, 360)."""
    polar: float
    """The camera's height, in [-90, 90)."""
    rotation: float
    """In the picture's plane, in [-90, 90), or [-180, 180) of a model with 360 outputs for it."""
    confidence: float


def orientation_of(scores: Tensor) -> Orientation:
    """The angles with the largest scores. scores: [360 + 180 + R + 2], R even, of which the bins of the rotation."""
    bins = len(scores) - AZIMUTHS - POLARS - FRONT
    azimuth, polar, rotation, front = scores.float().split([AZIMUTHS, POLARS, bins, FRONT])
    return Orientation(
        azimuth=float(azimuth.argmax()),
        polar=float(polar.argmax()) - POLARS / 2,
        rotation=float(rotation.argmax()) - bins / 2,
        confidence=float(front.softmax(0)[0]),
    )


class OrientAnything:
    """The estimator, frozen.

    `model`    hub id, folder or file of its weights
    `backbone` hub id or folder of the DINOv2 that it was made from, for its configuration and its image processor
    Raises ValueError for weights of another architecture.
    """

    def __init__(self, model: str = MODEL, backbone: str = BACKBONE, device: str = "cpu", reward: str = "edit_orient"):
        weights = read_weights(find(model, FILES, reward))
        head = {name: value for name, value in weights.items() if name.startswith("down_sampler.")}
        if "down_sampler.net1.0.weight" not in head:
            held = ", ".join(sorted(weights)[:3])
            raise ValueError(f"{reward}: {model!r} holds no Orient-Anything (no 'down_sampler' beside {held}...)")
        outputs, width = head["down_sampler.net1.0.weight"].shape
        config = transformers.AutoConfig.from_pretrained(backbone)
        if (config.model_type, config.hidden_size) != ("dinov2", width):
            got = f"a {config.model_type!r} of width {config.hidden_size}"
            raise ValueError(f"{reward}: {model!r} was made from a 'dinov2' of width {width}; {backbone!r} is {got}")
        tower = {name.removeprefix("dinov2."): value for name, value in weights.items() if name not in head}
        architecture: Any = transformers.Dinov2Model
        # from_pretrained knows the names that its architecture had when the file was written.
        self.dino, report = architecture.from_pretrained(
            None, config=config, state_dict=tower, output_loading_info=True
        )
        if wrong := sorted([*report["missing_keys"], *report["unexpected_keys"]]):
            raise ValueError(f"{reward}: {model!r} does not fit {backbone!r}: {', '.join(wrong[:3])}...")
        self.head = nn.ModuleDict(
            {
                "net1": nn.Sequential(nn.Linear(width, outputs), nn.BatchNorm1d(outputs), nn.ReLU()),
                "net2": nn.Sequential(nn.Linear(outputs, outputs), nn.BatchNorm1d(outputs)),
            }
        )
        fill(self.head, {name.removeprefix("down_sampler."): value for name, value in head.items()}, repr(model))
        self.processor = transformers.AutoImageProcessor.from_pretrained(backbone, backend="pil")
        for module in (self.dino, self.head):
            module.eval().requires_grad_(False)
        self.to(device)

    def to(self, device: str) -> None:
        """Move the model."""
        self.dino.to(device)
        self.head.to(device)

    @torch.no_grad()
    def __call__(self, pictures: Sequence[Image]) -> list[Orientation]:
        """The orientation of the thing in each picture."""
        pixels = self.processor(images=list(pictures), return_tensors="pt")["pixel_values"].to(self.dino.device)
        class_token = self.dino(pixel_values=pixels).last_hidden_state[:, 0]
        return [orientation_of(scores) for scores in self.head["net2"](self.head["net1"](class_token))]
