"""Rewards of videos: any reward of pictures on some frames, how much moves, how steady it is, what stays the same."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from rewards.contract import nearest, needs, to_uint8
from rewards.scorers.pictures.dino import MODEL, DinoFeatures

REDUCES = ("mean", "min")
EMPTY: Mapping[str, object] = MappingProxyType({})
FASTEST = 0.05  # of a frame's pixels make its motion
FLOW_SIDE = 256  # pixels of the shorter side at which motion is measured


def check_video(images: torch.Tensor, reward: str) -> None:
    """Raise ValueError unless `images` are videos [N, F, 3, H, W] of at least two frames."""
    if images.ndim != 5 or images.shape[1] < 2:
        raise ValueError(f"{reward}: needs videos [N, F, 3, H, W] of at least 2 frames, not {list(images.shape)}")


def spread(count: int, frames: int) -> list[int]:
    """At most `count` frame numbers of `frames`, evenly spread, the first and the last among them."""
    if count >= frames:
        return list(range(frames))
    return [round(k * (frames - 1) / (count - 1)) for k in range(count)] if count > 1 else [(frames - 1) // 2]


class PerFrame:
    """A pointwise reward of pictures on evenly spread frames of a video: the mean of its scores, or the least.

    `reward` its name, `args` its arguments; `frames` how many (default 4); `reduce` `mean` (default) or `min`

    Always the same frames, so that a score is a function of the video. Frames without a score are left out.
    """

    def __init__(
        self,
        reward: str,
        args: Mapping[str, object] = EMPTY,
        frames: int = 4,
        reduce: str = "mean",
        device: str = "cpu",
    ):
        if reduce not in REDUCES:
            raise ValueError(f"per_frame: unknown reduce {reduce!r}.{nearest(reduce, REDUCES)} Known: mean, min")
        if frames < 1:
            raise ValueError(f"per_frame: frames is {frames}; at least 1")
        load = importlib.import_module("rewards.loading").load  # it imports this module by name
        self.inner, self.name, self.frames, self.reduce = load(reward, args, device=device), reward, frames, reduce
        needed = needs(self.inner)
        if needed.kind != "pointwise":
            raise ValueError(f"per_frame: {reward!r} compares the samples of a group, which frames are not")
        rest = [name for name in needed.names if name not in ("images", "pil_images")]
        names = ["images", *rest]
        self.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])
        self._pil = needed.pil_images
        self._tensor = needed.images

    def to(self, device: str) -> None:
        """Move the model of the reward, if it has one."""
        importlib.import_module("rewards.contract").move(self.inner, device)

    def __call__(self, images: torch.Tensor, **rows: Sequence[Any]) -> torch.Tensor:
        from rewards.contract import read, to_pil

        check_video(images, f"per_frame of {self.name}")
        chosen = images[:, spread(self.frames, images.shape[1])]
        flat, each = chosen.flatten(0, 1), chosen.shape[1]
        given: dict[str, Any] = {name: [v for value in row for v in [value] * each] for name, row in rows.items()}
        if self._tensor:
            given["images"] = flat
        if self._pil:
            given["pil_images"] = to_pil(flat)
        scores = torch.tensor(read(self.inner(**given), len(flat), self.name).values, dtype=torch.float64)
        table = scores.view(len(images), each)
        if self.reduce == "min":
            least = table.nan_to_num(nan=torch.inf).amin(1)
            return torch.where(least.isinf(), torch.nan, least)
        return table.nanmean(1)


def motion(images: torch.Tensor) -> torch.Tensor:
    """How much moves in a video: optical flow of the fastest 5 % of pixels, mean over frames.

    In shares of the shorter side a frame: 0 for a still, .005 to .05 for usual motion. Flow by OpenCV's dense inverse
    search at 256 pixels. Noise and flicker move, too: watch `steadiness` beside it.
    """
    import cv2

    check_video(images, "motion")
    flow = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    scores = []
    for video in to_uint8(images):
        height, width = video.shape[1:3]
        scale = FLOW_SIDE / min(height, width)
        size = (round(width * scale), round(height * scale))
        grey = [cv2.cvtColor(cv2.resize(frame, size), cv2.COLOR_RGB2GRAY) for frame in video]
        speeds = []
        for a, b in zip(grey, grey[1:], strict=False):
            speed = np.linalg.norm(flow.calc(a, b, None), axis=-1).ravel()
            speeds.append(np.sort(speed)[-max(1, int(FASTEST * speed.size)) :].mean() / FLOW_SIDE)
        scores.append(float(np.mean(speeds)))
    return torch.tensor(scores)


def steadiness(images: torch.Tensor) -> torch.Tensor:
    """1 - the mean absolute difference of pixels from frame to frame, in [0, 1]; 1 for a still (VBench's flickering).

    Motion lowers it as flicker does. (Huang et al. 2023, arXiv 2311.17982.)
    """
    check_video(images, "steadiness")
    return 1 - (images[:, 1:] - images[:, :-1]).abs().flatten(1).mean(1)


steadiness.differentiable = True  # type: ignore[attr-defined]


class VideoConsistency:
    """Does the same subject stay through a video? Cosines of DINO's class tokens, in [-1, 1], usually above .7.

    Mean over frames t > 1 of half the cosine with the frame before and half that with the first (VBench's subject
    consistency, arXiv 2311.17982, which uses DINO ViT-B/16). A still scores 1: watch `motion` beside it.

    `model`, `size`, `dtype` as in `dino`
    """

    differentiable = True

    def __init__(self, model: str = MODEL, size: int = 224, dtype: str = "float32", device: str = "cpu"):
        self.dino = DinoFeatures(model, size, device, "video_consistency", dtype)

    def to(self, device: str) -> None:
        """Move the model."""
        self.dino.to(device)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        check_video(images, "video_consistency")
        tokens = torch.stack([self.dino.features(video).class_token for video in images])
        cosine = torch.nn.functional.cosine_similarity
        before = cosine(tokens[:, 1:], tokens[:, :-1], dim=-1)
        first = cosine(tokens[:, 1:], tokens[:, :1], dim=-1)
        return ((before + first) / 2).mean(1).to(images.device)
