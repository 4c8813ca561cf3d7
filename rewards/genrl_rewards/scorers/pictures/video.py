"""Rewards of videos: a reward of pictures on some frames, how much moves and how smoothly, what stays the same."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from genrl_rewards.contract import Scored, call, check_choice, needs, read, takes_pillow
from genrl_rewards.loading import EMPTY, load
from genrl_rewards.pictures import pil_list, to_uint8
from genrl_rewards.scorers.pictures.dino import MODEL, DinoFeatures

REDUCES = ("mean", "min")
FASTEST = 0.05  # the share of a frame's pixels, the fastest ones, whose speed is its motion
FLOW_SIDE = 256  # pixels of the shorter side at which motion is measured


def check_video(images: torch.Tensor, reward: str, least: int = 2) -> None:
    """Raise ValueError unless `images` are videos [N, F, 3, H, W] of at least so many frames."""
    if images.ndim != 5 or images.shape[1] < least:
        raise ValueError(f"{reward}: needs videos [N, F, 3, H, W] of at least {least} frames, not {list(images.shape)}")


def spread(count: int, frames: int) -> list[int]:
    """At most `count` frame numbers out of `frames`, evenly spread, including the first and the last."""
    if count >= frames:
        return list(range(frames))
    return [round(k * (frames - 1) / (count - 1)) for k in range(count)] if count > 1 else [(frames - 1) // 2]


class PerFrame:
    """Any pointwise reward of pictures on some frames of a video: the mean of its scores, or the lowest.

    `reward` its name, `args` its arguments; `frames` how many (default 4); `reduce` `mean` (default) or `min`

    The frames are evenly spread and always the same, so that a score is a function of the video. Frames without a score
    are left out. Parts of its score are reduced alike, each by itself.
    """

    def __init__(
        self,
        reward: str,
        args: Mapping[str, object] = EMPTY,
        frames: int = 4,
        reduce: str = "mean",
        device: str = "cpu",
    ):
        check_choice("per_frame: unknown reduce", reduce, REDUCES)
        if frames < 1:
            raise ValueError(f"per_frame: frames is {frames}; it must be at least 1")
        self.reward, self.name, self.frames, self.reduce = load(reward, args, device=device), reward, frames, reduce
        needed = needs(self.reward)
        if needed.kind != "pointwise":
            raise ValueError(f"per_frame: {reward!r} compares the samples of a group, which frames are not")
        self._takes = needed.names
        for method in ("to", "close", "check_row", "read_row", "read_value"):
            if hasattr(self.reward, method):
                setattr(self, method, getattr(self.reward, method))
        taken = inspect.signature(self.reward).parameters.values()
        others = [p.replace(kind=p.KEYWORD_ONLY) for p in taken if p.name not in ("images", "pil_images")]
        self.__signature__ = inspect.Signature([inspect.Parameter("images", inspect.Parameter.KEYWORD_ONLY), *others])

    def __call__(self, images: torch.Tensor, **rows: Sequence[Any]) -> Scored:
        check_video(images, f"per_frame of {self.name}")
        chosen = images[:, spread(self.frames, images.shape[1])]
        flat, each = chosen.flatten(0, 1), chosen.shape[1]
        per_frame: dict[str, Any] = {name: [v for value in row for v in [value] * each] for name, row in rows.items()}
        if "images" in self._takes:
            per_frame["images"] = pil_list(flat) if takes_pillow(self.reward) else flat
        if "pil_images" in self._takes:
            per_frame["pil_images"] = pil_list(flat)
        scores = read(call(self.reward, per_frame), len(flat), self.name)

        def reduced(row: list[float]) -> list[float]:
            table = torch.tensor(row, dtype=torch.float64).view(len(images), each)
            if self.reduce == "mean":
                return table.nanmean(1).tolist()
            lowest = table.nan_to_num(nan=torch.inf).amin(1)
            return torch.where(lowest.isinf(), torch.nan, lowest).tolist()

        return reduced(scores.values), {part: reduced(row) for part, row in scores.parts.items()}


def motion(images: torch.Tensor) -> torch.Tensor:
    """How much moves in a video: optical flow of the fastest 5 % of pixels, mean over frames; [N].

    In shares of the shorter side per frame: 0 for a still, .005 to .05 for usual motion. Flow by OpenCV's dense inverse
    search at 256 pixels. Noise and flicker count as motion: monitor `steadiness`, too.
    Raises ValueError unless `images` are videos of at least 2 frames.
    """
    import cv2

    check_video(images, "motion")
    flow: Any = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    scores = []
    for video in to_uint8(images):
        grey = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in _small(video)]
        speeds = []
        for a, b in zip(grey, grey[1:], strict=False):
            speed = np.linalg.norm(flow.calc(a, b, None), axis=-1).ravel()
            speeds.append(np.sort(speed)[-max(1, int(FASTEST * speed.size)) :].mean() / FLOW_SIDE)
        scores.append(float(np.mean(speeds)))
    return torch.tensor(scores)


def _small(video: Any) -> list[Any]:
    """The frames of a video, [F, H, W, 3] in 8 bits, with a shorter side of `FLOW_SIDE` pixels."""
    import cv2

    height, width = video.shape[1:3]
    scale = FLOW_SIDE / min(height, width)
    return [cv2.resize(frame, (round(width * scale), round(height * scale))) for frame in video]


def smoothness(images: torch.Tensor) -> torch.Tensor:
    """How well every second frame is foreseen from its neighbours, in [0, 1], usually above .9; 1 for a still.

    1 - mean absolute difference of the frame and the middle of its neighbours along their optical flow: jerks, jumps
    and flicker lower it. VBench's motion smoothness (Huang et al. 2023, arXiv 2311.17982), which interpolates by a
    network (AMT); here OpenCV's dense inverse search at 256 pixels. A still is perfect: monitor `motion`, too; [N].
    Raises ValueError unless `images` are videos of at least 3 frames.
    """
    import cv2

    check_video(images, "smoothness", least=3)
    flow: Any = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    scores = []
    for video in to_uint8(images):
        frames = _small(video)
        down, along = np.indices(frames[0].shape[:2], dtype=np.float32)
        place = np.stack([along, down], -1)
        errors = []
        for before, frame, after in zip(frames[:-2:2], frames[1:-1:2], frames[2::2], strict=True):
            both = [cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY) for picture in (before, after)]
            # The middle frame, were the motion even: each neighbour is moved half of the way, and the mean of both
            # evens out what one of them covers.
            half = flow.calc(*both, None) / 2
            warped = [
                cv2.remap(picture, at[..., 0], at[..., 1], cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
                for picture, at in ((before, place - half), (after, place + half))
            ]
            errors.append(np.abs(np.mean(warped, axis=0) - frame).mean() / 255)
        scores.append(1 - float(np.mean(errors)))
    return torch.tensor(scores)


def steadiness(images: torch.Tensor) -> torch.Tensor:
    """1 - mean absolute difference of pixels from frame to frame, a monitor of flicker; in [0, 1], 1 for a still.

    Motion lowers it as flicker does. VBench's temporal flickering (Huang et al. 2023, arXiv 2311.17982); [N].
    Raises ValueError unless `images` are videos of at least 2 frames.
    """
    check_video(images, "steadiness")
    return 1 - (images[:, 1:] - images[:, :-1]).abs().flatten(1).mean(1)


steadiness.differentiable = True  # type: ignore[attr-defined]


class VideoConsistency:
    """Does the subject stay the same through a video? Cosines of DINO's class tokens, in [-1, 1], usually above .7.

    Mean over frames t > 1 of half the cosine with the frame before and half that with the first (VBench's subject
    consistency, arXiv 2311.17982, which uses DINO ViT-B/16). A still scores 1: monitor `motion`, too.

    `model`, `size`, `dtype` as in `dino`
    """

    differentiable = True

    def __init__(self, model: str = MODEL, size: int = 224, dtype: str = "float32", device: str = "cpu"):
        self.dino = DinoFeatures(model, size, device, "video_consistency", dtype)
        self.to = self.dino.to

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        check_video(images, "video_consistency")
        tokens = torch.stack([self.dino.features(video).class_token for video in images])
        cosine = torch.nn.functional.cosine_similarity
        before = cosine(tokens[:, 1:], tokens[:, :-1], dim=-1)
        first = cosine(tokens[:, 1:], tokens[:, :1], dim=-1)
        return ((before + first) / 2).mean(1).to(images.device)
