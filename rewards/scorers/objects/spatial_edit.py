"""Rewards: was a thing moved, resized or turned as asked, and the rest left alone? Talk2Move, on source and result.

The thing's name is the column `object`, the source picture the file in the column `source_image`. A thing that is not
found in the source has no score; one that is not found in the result scores 0: it has disappeared.

Things are found by a detector, or with `detector: shapes` by the rules of the embedded world
(`rewards.scorers.objects.shapes`), where a thing is called "red circle".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from PIL.Image import Image

from rewards.contract import Scored, check_choice
from rewards.scorers.objects import geometry
from rewards.scorers.objects.detection import MASKED, Detector, Thing, thing_of_mask
from rewards.scorers.objects.shapes import COLOURS, SHAPES, located

DETECTOR = "IDEA-Research/grounding-dino-tiny"
SEGMENTER = "facebook/mask2former-swin-small-coco-instance"
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
                thing_of_mask(mask, 1.0 if found.shape == shape else BLOB)
                for found, mask in everything
                if found.colour == colour and found.shape in (shape, None)
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

    `detector`  hub id or folder, see `rewards.scorers.objects.detection.Detector`; or `shapes`
    `threshold` lowest confidence of the thing
    """

    def __init__(self, detector: str = DETECTOR, threshold: float = 0.3, device: str = "cpu"):
        self.finder = Finder(detector, threshold, device, "edit_move")
        self.to = self.finder.to

    def __call__(
        self, pil_images: list[Image], source_images: list[Image], object: list[str], direction: list[str]
    ) -> Scored:
        for asked in direction:
            check_choice("edit_move: unknown direction", asked, geometry.DIRECTIONS)

        def judge(i: int, before: Thing, after: Thing) -> Verdict:
            way = geometry.distance(before.box, after.box, *source_images[i].size)
            return geometry.displacement_score(before.box, after.box, direction[i]), {"distance": way}

        return self.finder.score(source_images, pil_images, object, judge, ["distance"])


class EditScale:
    """Was a thing made larger or smaller as requested? By a detector on source and result, in [0, 1].

    The column `factor` is how many times as large it should be in width and height; .5 is half as large. The score is
    1 - (|w - f| + |h - f|) / 4, at least 0, with w and h the ratios of the sides and f the factor; for a factor below 1
    all three are inverted. How well it stayed in place is the part `position`.

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


class EditKeep:
    """Was the picture left alone outside the edited thing? By the difference of pixels, in [0, 1].

    1 less the root mean square difference of source and result outside the boxes of the thing in both. Talk2Move uses
    LPIPS there. This needs no weights and is a monitor for small pictures: it does not know what a difference looks
    like.

    `detector`, `threshold` as in `edit_move`
    """

    def __init__(self, detector: str = DETECTOR, threshold: float = 0.3, device: str = "cpu"):
        self.finder = Finder(detector, threshold, device, "edit_keep")
        self.to = self.finder.to

    def __call__(self, pil_images: list[Image], source_images: list[Image], object: list[str]) -> list[float]:
        scores = []
        for source, result, name in zip(source_images, pil_images, object, strict=True):
            before, after = self.finder.both(source, result, name)
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
        raise ValueError(f"{reward}: the column {column!r} holds {value!r}, which is not a number") from error
