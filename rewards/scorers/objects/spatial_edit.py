"""Rewards: was a thing moved, resized or turned as asked, and the rest left alone? Source and result (Talk2Move).

The thing's name is the column `object`, the source picture the file in the column `source_image`. A thing that is not
found in the source has no score; one that is not found in the result scores 0: it is gone.

Things are found by a detector, or with `detector: shapes` by the rules of the embedded world
(`rewards.scorers.objects.shapes`), where
they are called "red circle".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rewards.contract import nearest
from rewards.scorers.objects.detection import MASKED, Detector, Thing
from rewards.scorers.objects.geneval_check import Box
from rewards.scorers.objects.geometry import (
    DIRECTIONS,
    displacement_score,
    distance,
    position_score,
    scale_score,
    turn_between,
    turn_score,
)
from rewards.scorers.objects.shapes import COLOURS, SHAPES, located

if TYPE_CHECKING:
    from PIL.Image import Image

DETECTOR = "IDEA-Research/grounding-dino-tiny"
SEGMENTER = "facebook/mask2former-swin-small-coco-instance"
Scored = tuple[list[float], dict[str, list[float]]]


class ShapeDetector:
    """What a detector does, for the embedded world, by rule.

    "red circle" is found by colour and outline, with a confidence of 1, and a red thing whose outline is none of the
    world's with one of `BLOB`. Of equals the largest comes first.
    """

    kind = "shapes"
    BLOB = 0.5

    def __init__(self, reward: str):
        self.reward = reward

    def to(self, device: str) -> None:
        """There is no model."""

    def find(self, picture: Image, names: Sequence[str], threshold: float) -> dict[str, list[Thing]]:
        """Things of each name with a confidence above `threshold`, the most confident first."""
        kinds = {f"{colour} {shape}": (colour, shape) for colour in COLOURS for shape in SHAPES}
        rows: dict[str, list[Thing]] = {}
        everything = sorted(located(np.asarray(picture.convert("RGB"))), key=lambda one: -one[0].area)
        for name in names:
            if name not in kinds:
                raise ValueError(
                    f"{self.reward}: no thing of the small world is called {name!r}.{nearest(name, kinds)}"
                )
            colour, shape = kinds[name]
            things = [
                Thing(_around(mask, 1.0 if found.shape == shape else self.BLOB), mask)
                for found, mask in everything
                if found.colour == colour and found.shape in (shape, None)
            ]
            rows[name] = sorted(
                (thing for thing in things if thing.box.score > threshold), key=lambda thing: -thing.box.score
            )
        return rows


def _around(mask: np.ndarray, score: float) -> Box:
    ys, xs = np.nonzero(mask)
    return Box(float(xs.min()), float(ys.min()), float(xs.max() + 1), float(ys.max() + 1), score)


def open_detector(detector: str, device: str, reward: str) -> Detector | ShapeDetector:
    """A model by hub id or folder, or the rules of the embedded world: `shapes`."""
    return ShapeDetector(reward) if detector == "shapes" else Detector(detector, device, reward)


class _Finder(NamedTuple):
    detector: Detector | ShapeDetector
    threshold: float

    def both(self, source: Image, result: Image, name: str) -> tuple[Thing | None, Thing | None]:
        """The most confident thing of that name in each; the result's place in pixels of the source."""
        before = self.detector.find(source, [name], self.threshold)[name]
        after = self.detector.find(result.resize(source.size), [name], self.threshold)[name]
        return (before[0] if before else None), (after[0] if after else None)

    def score(
        self,
        sources: Sequence[Image],
        results: Sequence[Image],
        names: Sequence[str],
        judge: Callable[[int, Thing, Thing], tuple[float, dict[str, float]]],
        parts: Sequence[str],
    ) -> Scored:
        rows: list[tuple[float, dict[str, float]]] = []
        for i, (source, result, name) in enumerate(zip(sources, results, names, strict=True)):
            before, after = self.both(source, result, name)
            if before is None:
                rows.append((math.nan, {}))
            else:
                rows.append((0.0, {}) if after is None else judge(i, before, after))
        return [row[0] for row in rows], {part: [row[1].get(part, math.nan) for row in rows] for part in parts}


class EditMove:
    """Was the thing moved in the direction of the column `direction` (left, right, up, down)? In [0, 1].

    The share of its offset along that axis, 0 for the other way: how purely, not how far. How far, as a share of the
    picture's diagonal, is the part `distance`.

    `detector`  hub id or folder, see `rewards.scorers.objects.detection.Detector`; or `shapes`
    `threshold` least confidence of the thing
    """

    def __init__(self, detector: str = DETECTOR, threshold: float = 0.3, device: str = "cpu"):
        self._finder = _Finder(open_detector(detector, device, "edit_move"), threshold)

    def to(self, device: str) -> None:
        """Move the model."""
        self._finder.detector.to(device)

    def __call__(
        self,
        pil_images: Sequence[Image],
        source_images: Sequence[Image],
        object: Sequence[str],
        direction: Sequence[str],
    ) -> Scored:
        for asked in direction:
            if asked not in DIRECTIONS:
                known = ", ".join(DIRECTIONS)
                raise ValueError(f"edit_move: unknown direction {asked!r}.{nearest(asked, DIRECTIONS)} Known: {known}")

        def judge(i: int, before: Thing, after: Thing) -> tuple[float, dict[str, float]]:
            size = source_images[i].size
            return displacement_score(before.box, after.box, direction[i]), {
                "distance": distance(before.box, after.box, *size)
            }

        return self._finder.score(source_images, pil_images, object, judge, ["distance"])


class EditScale:
    """Was the thing made `factor` times as large (the column; .5 is half as large) in width and height? In [0, 1].

    1 - (|w - f| + |h - f|) / 4, at least 0, with the ratios w and h of the sides, and f the factor, or for a factor
    below 1 all three turned round. How far it stayed in place is the part `position`.

    `detector`, `threshold` as in `edit_move`
    """

    def __init__(self, detector: str = DETECTOR, threshold: float = 0.3, device: str = "cpu"):
        self._finder = _Finder(open_detector(detector, device, "edit_scale"), threshold)

    def to(self, device: str) -> None:
        """Move the model."""
        self._finder.detector.to(device)

    def __call__(
        self,
        pil_images: Sequence[Image],
        source_images: Sequence[Image],
        object: Sequence[str],
        factor: Sequence[float],
    ) -> Scored:
        factors = [_number(value, "edit_scale", "factor") for value in factor]
        for value in factors:
            if value <= 0:
                raise ValueError(f"edit_scale: the column 'factor' must be above 0, not {value}")

        def judge(i: int, before: Thing, after: Thing) -> tuple[float, dict[str, float]]:
            bigger = factors[i] >= 1
            wanted = factors[i] if bigger else 1 / factors[i]
            score = max(0.0, scale_score(before.box, after.box, wanted, bigger))
            return score, {"position": position_score(before.box, after.box)}

        return self._finder.score(source_images, pil_images, object, judge, ["position"])


class EditRotate:
    """Was the thing turned by `angle` degrees (the column; positive is clockwise) in the picture's plane? In [0, 1].

    Half for turning at all (10 degrees or more), half for the right way less the error over 180. The turn is what best
    lays the thing's mask over its later one, so a thing that looks the same after a turn cannot be judged. The measured
    turn is the part `angle`, how far it stayed in place the part `position`.

    `detector`  hub id or folder of a detector with masks (Mask2Former), or `shapes`; `threshold` as in `edit_move`
    """

    def __init__(self, detector: str = SEGMENTER, threshold: float = 0.3, device: str = "cpu"):
        found = open_detector(detector, device, "edit_rotate")
        if found.kind not in (*MASKED, ShapeDetector.kind):
            raise ValueError(f"edit_rotate: {detector!r} is a {found.kind!r}, which gives no masks; use a Mask2Former")
        self._finder = _Finder(found, threshold)

    def to(self, device: str) -> None:
        """Move the model."""
        self._finder.detector.to(device)

    def __call__(
        self, pil_images: Sequence[Image], source_images: Sequence[Image], object: Sequence[str], angle: Sequence[float]
    ) -> Scored:
        angles = [_number(value, "edit_rotate", "angle") for value in angle]

        def judge(i: int, before: Thing, after: Thing) -> tuple[float, dict[str, float]]:
            assert before.mask is not None and after.mask is not None
            turn = turn_between(before.mask, after.mask)
            return turn_score(turn, angles[i]), {"angle": turn, "position": position_score(before.box, after.box)}

        return self._finder.score(source_images, pil_images, object, judge, ["angle", "position"])


class EditKeep:
    """Was everything else left alone? 1 less the root mean square difference of source and result, outside the boxes
    that the thing has in them. In [0, 1].

    Talk2Move takes LPIPS there. This needs no weights, and is a monitor for small pictures: it knows nothing of what a
    difference looks like.

    `detector`, `threshold` as in `edit_move`
    """

    def __init__(self, detector: str = DETECTOR, threshold: float = 0.3, device: str = "cpu"):
        self._finder = _Finder(open_detector(detector, device, "edit_keep"), threshold)

    def to(self, device: str) -> None:
        """Move the model."""
        self._finder.detector.to(device)

    def __call__(
        self, pil_images: Sequence[Image], source_images: Sequence[Image], object: Sequence[str]
    ) -> list[float]:
        scores = []
        for source, result, name in zip(source_images, pil_images, object, strict=True):
            before, after = self._finder.both(source, result, name)
            if before is None:
                scores.append(math.nan)
                continue
            difference = (np.asarray(source, np.float64) - np.asarray(result.resize(source.size), np.float64)) / 255
            outside = np.ones(difference.shape[:2], dtype=bool)
            for thing in (before, after):
                if thing is not None:
                    box = thing.box
                    rows = slice(max(0, math.floor(box.top)), math.ceil(box.bottom))
                    outside[rows, max(0, math.floor(box.left)) : math.ceil(box.right)] = False
            scores.append(1 - float(np.sqrt(np.square(difference[outside]).mean())) if outside.any() else math.nan)
        return scores


def _number(value: object, reward: str, column: str) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{reward}: the column {column!r} holds {value!r}, which is no number") from error
