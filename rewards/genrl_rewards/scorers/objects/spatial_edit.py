"""Rewards: was a thing moved, resized or turned as asked, and the rest left alone? Talk2Move, on source and result.

The thing's name is the column `object`, the source picture the file in the column `source_image`. A thing that is not
found in the source has no score; one that is not found in the result scores 0: it has disappeared.

Things are found by a detector, or with `detector: shapes` by the rules of the embedded world
(`genrl_rewards.scorers.objects.shapes`), where a thing is called "red circle".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL.Image import Image, fromarray

from genrl_rewards.contract import Scored, check_choice
from genrl_rewards.models import orient_anything
from genrl_rewards.models.pixels import from_pil
from genrl_rewards.scorers.objects import geometry
from genrl_rewards.scorers.objects.detection import MASKED, Detector, Thing, thing_of_mask
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES, located
from genrl_rewards.scorers.pictures.similarity import lpips

DETECTOR = "IDEA-Research/grounding-dino-tiny"
SEGMENTER = "facebook/mask2former-swin-small-coco-instance"
METRICS = ("rmse", "lpips")
AXES = ("azimuth", "polar", "rotation")
BLOB = 0.5
"""Confidence for a thing of the right colour whose outline is none of the embedded world's."""
Verdict: TypeAlias = tuple[float, dict[str, float]]
"""Score and parts of one edit."""


class ShapeDetector:
    """A detector for the embedded world that works by rule.

    "red circle" is found by colour and outline with a confidence of 1, and a red thing whose outline is none of the
    world's with one of `BLOB`. Of equals the largest comes first.
    """

    kind = "shapes"

    def __init__(self, reward: str):
        self.reward = reward

    def to(self, device: str) -> None:
        """There is no model."""

    def find(self, picture: Image, names: Sequence[str], threshold: float) -> dict[str, list[Thing]]:
        """Things of each name with a confidence above `threshold`, the most confident first."""
        kinds = {f"{colour} {shape}": (colour, shape) for colour in COLOURS for shape in SHAPES}
        rows: dict[str, list[Thing]] = {}
        everything = sorted(located(np.asarray(picture.convert("RGB"))), key=lambda pair: -pair[0].area)
        for name in names:
            check_choice(f"{self.reward}: the embedded world has no", name, kinds)
            colour, shape = kinds[name]
            things = [
                thing_of_mask(mask, 1.0 if box.shape == shape else BLOB)
                for box, mask in everything
                if box.colour == colour and box.shape in (shape, None)
            ]
            likely = [thing for thing in things if thing.box.score > threshold]
            rows[name] = sorted(likely, key=lambda thing: -thing.box.score)
        return rows


class Finder:
    """Finds a thing in source and result, by a detector (hub id or folder, or `shapes`) and its lowest confidence."""

    def __init__(self, detector: str, threshold: float, device: str, reward: str):
        self.threshold = threshold
        self.detector = ShapeDetector(reward) if detector == "shapes" else Detector(detector, device, reward)
        self.to: Callable[[str], Any] = self.detector.to

    def both(self, source: Image, result: Image, name: str) -> tuple[Thing | None, Thing | None]:
        """The most confident thing of that name in each, with its position in the result in pixels of the source."""
        before = self.detector.find(source, [name], self.threshold)[name]
        # Editing pipelines choose their own sizes, and offsets and ratios are in pixels.
        after = self.detector.find(result.resize(source.size), [name], self.threshold)[name]
        return (before[0] if before else None), (after[0] if after else None)

    def score(
        self,
        sources: list[Image],
        results: list[Image],
        names: list[str],
        judge: Callable[[int, Thing, Thing], Verdict],
        parts: list[str],
    ) -> Scored:
        """Scores and parts of N edits, by `judge` of the row and the thing before and after."""
        rows: list[Verdict] = []
        for i, (source, result, name) in enumerate(zip(sources, results, names, strict=True)):
            before, after = self.both(source, result, name)
            if before is None:
                rows.append((math.nan, {}))
            else:
                rows.append((0.0, {}) if after is None else judge(i, before, after))
        return [row[0] for row in rows], {part: [row[1].get(part, math.nan) for row in rows] for part in parts}


class EditMove:
    """Was a thing moved in the requested direction? By a detector on source and result, in [0, 1].

    The column `direction` is left, right, up or down. The score is the share of the thing's offset along that axis, 0
    for the other way: how purely it moved, not how far, which is the part `distance`, as a share of the diagonal.

    `detector`  hub id or folder, see `genrl_rewards.scorers.objects.detection.Detector`; or `shapes`
    `threshold` lowest confidence of the thing
    """

    def __init__(self, detector: str = DETECTOR, threshold: float = 0.3, device: str = "cpu"):
        self.finder = Finder(detector, threshold, device, "edit_move")
        self.to = self.finder.to

    def __call__(
        self, pil_images: list[Image], source_images: list[Image], object: list[str], direction: list[str]
    ) -> Scored:
        for turn in direction:
            check_choice("edit_move: unknown direction", turn, geometry.DIRECTIONS)

        def judge(i: int, before: Thing, after: Thing) -> Verdict:
            way = geometry.distance(before.box, after.box, *source_images[i].size)
            return geometry.displacement_score(before.box, after.box, direction[i]), {"distance": way}

        return self.finder.score(source_images, pil_images, object, judge, ["distance"])


class EditScale:
    """Was a thing made larger or smaller as requested? By a detector on source and result, in [0, 1].

    The column `factor` is how many times as large it should be in width and height; .5 is half as large. The score is
    1 - (|w - f| + |h - f|) / 4, at least 0, with w and h the ratios of the sides and f the factor; for a factor below 1
    all three are inverted. How well it stayed in place is the part `position`, which `edit_position` gives a weight.

    `detector`, `threshold` as in `edit_move`
    """

    def __init__(self, detector: str = DETECTOR, threshold: float = 0.3, device: str = "cpu"):
        self.finder = Finder(detector, threshold, device, "edit_scale")
        self.to = self.finder.to

    def __call__(
        self, pil_images: list[Image], source_images: list[Image], object: list[str], factor: list[float]
    ) -> Scored:
        factors = [_number(value, "edit_scale", "factor") for value in factor]
        for value in factors:
            if value <= 0:
                raise ValueError(f"edit_scale: the column 'factor' must be above 0, not {value}")

        def judge(i: int, before: Thing, after: Thing) -> Verdict:
            bigger = factors[i] >= 1
            wanted = factors[i] if bigger else 1 / factors[i]
            score = max(0.0, geometry.scale_score(before.box, after.box, wanted, bigger))
            return score, {"position": geometry.position_score(before.box, after.box)}

        return self.finder.score(source_images, pil_images, object, judge, ["position"])


class EditRotate:
    """Was a thing turned in the picture's plane as requested? By masks of source and result, in [0, 1].

    The column `angle` is in degrees, positive means clockwise. Half of the score is for turning at all (10 degrees or
    more), half for the right direction less the error over 180. The turn is the one that best maps the thing's mask to
    its later one, so a thing that looks the same after a turn cannot be judged. The measured turn is the part `angle`,
    how well the thing stayed in place the part `position`.

    `detector`  hub id or folder of a detector with masks (Mask2Former), or `shapes`; `threshold` as in `edit_move`
    """

    def __init__(self, detector: str = SEGMENTER, threshold: float = 0.3, device: str = "cpu"):
        self.finder = Finder(detector, threshold, device, "edit_rotate")
        self.to = self.finder.to
        kind = self.finder.detector.kind
        if kind not in (*MASKED, ShapeDetector.kind):
            raise ValueError(f"edit_rotate: {detector!r} is a {kind!r}, which gives no masks; use a Mask2Former")

    def __call__(
        self, pil_images: list[Image], source_images: list[Image], object: list[str], angle: list[float]
    ) -> Scored:
        angles = [_number(value, "edit_rotate", "angle") for value in angle]

        def judge(i: int, before: Thing, after: Thing) -> Verdict:
            assert before.mask is not None and after.mask is not None
            turn = geometry.turn_between(before.mask, after.mask)
            return geometry.turn_score(turn, angles[i]), {
                "angle": turn,
                "position": geometry.position_score(before.box, after.box),
            }

        return self.finder.score(source_images, pil_images, object, judge, ["angle", "position"])


class EditOrient:
    """Was a thing turned in space as requested? By Orient-Anything on its crops in source and result, in [0, 1].

    The column `axis` is azimuth (around the vertical), polar or rotation (in the picture's plane), `angle` the degrees
    by which that angle is to grow (clockwise, to the paper); negative means to fall. The thing turned around the axis
    of its largest change. Half of the score is for the right axis, half for the right direction less the error over
    180; a turn of less than 10 degrees scores 0. Parts are the three changes and the lower `confidence` of the two
    crops: near 0 the thing has no front, and its azimuth means nothing.

    `model`, `backbone` see `genrl_rewards.models.orient_anything.OrientAnything`
    `detector`, `threshold` as in `edit_move`; a detector with masks has the background of the crops white, as published
    """

    def __init__(
        self,
        model: str = orient_anything.MODEL,
        backbone: str = orient_anything.BACKBONE,
        detector: str = SEGMENTER,
        threshold: float = 0.3,
        device: str = "cpu",
    ):
        self.finder = Finder(detector, threshold, device, "edit_orient")
        self.estimate = orient_anything.OrientAnything(model, backbone, device, "edit_orient")

    def to(self, device: str) -> None:
        """Move both models."""
        self.finder.to(device)
        self.estimate.to(device)

    def __call__(
        self,
        pil_images: list[Image],
        source_images: list[Image],
        object: list[str],
        axis: list[str],
        angle: list[float],
    ) -> Scored:
        for turn in axis:
            check_choice("edit_orient: unknown axis", turn, AXES)
        angles = [_number(value, "edit_orient", "angle") for value in angle]

        def judge(i: int, before: Thing, after: Thing) -> Verdict:
            source = source_images[i]
            first, second = self.estimate([crop(source, before), crop(pil_images[i].resize(source.size), after)])
            turns = {name: geometry.wrapped(getattr(second, name) - getattr(first, name)) for name in AXES}
            around = max(turns, key=lambda name: abs(turns[name]))
            score = geometry.turn_score(turns[around], angles[i], around == axis[i])
            return score, turns | {"confidence": min(first.confidence, second.confidence)}

        return self.finder.score(source_images, pil_images, object, judge, [*AXES, "confidence"])


class EditPosition:
    """Did a thing that was to be resized or turned stay where it was? By a detector on source and result, in [0, 1].

    1 - (|x| + |y|) / 2 of its relative offset. Talk2Move gives it a weight of .1 beside .9 for the rotation.

    `detector`, `threshold` as in `edit_move`
    """

    def __init__(self, detector: str = DETECTOR, threshold: float = 0.3, device: str = "cpu"):
        self.finder = Finder(detector, threshold, device, "edit_position")
        self.to = self.finder.to

    def __call__(self, pil_images: list[Image], source_images: list[Image], object: list[str]) -> Scored:
        def judge(i: int, before: Thing, after: Thing) -> Verdict:
            return geometry.position_score(before.box, after.box), {}

        return self.finder.score(source_images, pil_images, object, judge, [])


class EditKeep:
    """Was the picture left alone outside the edited thing? By pixels or by LPIPS, at most 1.

    A thing that is gone is no loss here; one that is not in the source has no score.

    `metric` `rmse` (default): 1 less the root mean square difference of source and result outside the boxes of the
             thing in both. Needs no weights, but does not know what a difference looks like: a monitor for small
             pictures. `lpips`: 1 - LPIPS (VGG-16) of the source and the result, in which the thing's pixels in either
             are the source's (Talk2Move); with a detector without masks those are its boxes
    `detector`, `threshold` as in `edit_move`
    """

    def __init__(self, detector: str = DETECTOR, threshold: float = 0.3, metric: str = "rmse", device: str = "cpu"):
        check_choice("edit_keep: unknown metric", metric, METRICS)
        self.finder = Finder(detector, threshold, device, "edit_keep")
        self.lpips = lpips("vgg", device, "edit_keep") if metric == "lpips" else None

    def to(self, device: str) -> None:
        """Move the models."""
        self.finder.to(device)
        if self.lpips is not None:
            self.lpips.to(device)

    def __call__(self, pil_images: list[Image], source_images: list[Image], object: list[str]) -> list[float]:
        scores = []
        for source, result, name in zip(source_images, pil_images, object, strict=True):
            before, after = self.finder.both(source, result, name)
            things = [thing for thing in (before, after) if thing is not None]
            inside = np.zeros((source.height, source.width), dtype=bool)
            for thing in things:
                inside |= _pixels(thing, inside.shape, boxes=self.lpips is None)
            if before is None or inside.all():
                scores.append(math.nan)
            elif self.lpips is None:
                difference = (np.asarray(source, np.float64) - np.asarray(result.resize(source.size), np.float64)) / 255
                scores.append(1 - float(np.sqrt(np.square(difference[~inside]).mean())))
            else:
                scores.append(1 - self._lpips(source, result.resize(source.size), inside))
        return scores

    @torch.no_grad()
    def _lpips(self, source: Image, result: Image, inside: np.ndarray) -> float:
        """LPIPS of two pictures where they differ outside a mask [H, W] and one pixel around it."""
        assert self.lpips is not None
        mask = torch.nn.functional.max_pool2d(torch.from_numpy(inside)[None, None].float(), 3, stride=1, padding=1)
        first, second = from_pil(source), from_pil(result)
        pair = (first, torch.where(mask > 0, first, second))
        # In one memory layout: equal pictures give equal features to the last bit.
        return float(self.lpips(*(picture.contiguous().to(self.lpips.device) for picture in pair)))


def crop(picture: Image, thing: Thing) -> Image:
    """The thing's box of a picture, white where its mask, if it has one, is not."""
    box = (
        math.floor(thing.box.left),
        math.floor(thing.box.top),
        math.ceil(thing.box.right),
        math.ceil(thing.box.bottom),
    )
    if thing.mask is None:
        return picture.crop(box)
    return fromarray(np.where(thing.mask[..., None], np.asarray(picture.convert("RGB")), np.uint8(255))).crop(box)


def _pixels(thing: Thing, shape: tuple[int, ...], boxes: bool) -> np.ndarray:
    """The pixels of a thing, bool [H, W]: its mask, or its box where it has none or boxes are asked for."""
    if thing.mask is not None and not boxes:
        return thing.mask
    inside, box = np.zeros(shape, dtype=bool), thing.box
    rows = slice(max(0, math.floor(box.top)), math.ceil(box.bottom))
    inside[rows, max(0, math.floor(box.left)) : math.ceil(box.right)] = True
    return inside


def _number(value: object, reward: str, column: str) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{reward}: the column {column!r} holds {value!r}, which is not a number") from error
