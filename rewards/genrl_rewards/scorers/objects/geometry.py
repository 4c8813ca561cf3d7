"""Arithmetic on boxes and masks: whether the requested objects are there, in number, colour and place (GenEval's rules,
arXiv 2310.11513), and how a thing moved, grew and turned between two pictures (Talk2Move, arXiv 2601.02356).

Nothing is detected here: a picture is a dictionary from class names to boxes, the most confident first. Boxes are in
pixels. Angles are in degrees, positive means clockwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

DEAD_ZONE = 0.1  # of the sum of both sizes: a smaller offset counts as none
DIAGONAL = 0.5  # of the offset's length: an axis with a smaller share does not count

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")


class Box(NamedTuple):
    """Corners in pixels, y downwards, and the detector's confidence."""

    left: float
    top: float
    right: float
    bottom: float
    score: float = 1.0


Detections = Mapping[str, Sequence[Box]]
ColourOf = Callable[[str, Sequence[Box]], Sequence[str]]
"""The colours of some boxes of a class."""


def offset(a: Box, b: Box) -> tuple[float, float]:
    """(x, y) from the centre of b to that of a, less the dead zone of each axis, over the length of the whole offset.

    (0, 0) if the centres coincide or are within the dead zone.
    """
    centre_offset = ((a.left + a.right - b.left - b.right) / 2, (a.top + a.bottom - b.top - b.bottom) / 2)
    sizes = (a.right - a.left + b.right - b.left, a.bottom - a.top + b.bottom - b.top)
    beyond = [math.copysign(max(abs(w) - DEAD_ZONE * s, 0.0), w) for w, s in zip(centre_offset, sizes, strict=True)]
    if all(abs(r) < 1e-3 for r in beyond):
        return 0.0, 0.0
    return beyond[0] / math.hypot(*centre_offset), beyond[1] / math.hypot(*centre_offset)


def relations(a: Box, b: Box) -> set[str]:
    """Relations of a to b: none, one or two of `left of`, `right of`, `above`, `below`."""
    x, y = offset(a, b)
    tests = {"left of": x < -DIAGONAL, "right of": x > DIAGONAL, "above": y < -DIAGONAL, "below": y > DIAGONAL}
    return {name for name, holds in tests.items() if holds}


@dataclass(frozen=True)
class Verdict:
    """On one picture.

    relaxed: GenEval's own rule: at least the requested objects are there. strict: exactly these are. Each 1 or 0.
    partial: the mean of a term for each thing requested, in [0, 1]; count, colour, position: the means of the terms of
    that kind, NaN if nothing of the kind was requested.
    """

    relaxed: float
    strict: float
    partial: float
    count: float
    colour: float
    position: float


def check(asked: Mapping[str, Any], detections: Detections, colour_of: ColourOf) -> Verdict:
    """Compare the requested objects with those found.

    `asked` is a row of GenEval's prompts: `include`, a list of {class, count, color?, position?: [relation, index of an
    earlier item]}, and perhaps `exclude`, a list of {class, count} (fewer than count must be there).
    """
    terms = _terms(asked.get("include", []), detections, colour_of)
    excluded = all(len(detections.get(item["class"], [])) < item["count"] for item in asked.get("exclude") or [])
    means = {kind: [value for name, value in terms if name == kind] for kind in ("count", "colour", "position")}
    return Verdict(
        relaxed=float(_relaxed(asked.get("include", []), detections, colour_of) and excluded),
        strict=float(all(value == 1.0 for _, value in terms) and excluded),
        partial=_mean([value for _, value in terms]),
        count=_mean(means["count"]),
        colour=_mean(means["colour"]),
        position=_mean(means["position"]),
    )


def _terms(
    include: Sequence[Mapping[str, Any]], detections: Detections, colour_of: ColourOf
) -> list[tuple[str, float]]:
    """(kind, value in [0, 1]) of everything requested.

    With a wrong number of objects, their colour or position cannot be determined and gets a single 0. With a wrong
    colour, the position is left out of the mean.
    """
    terms: list[tuple[str, float]] = []
    groups: list[Sequence[Box] | None] = []
    for item in include:
        boxes, count = detections.get(item["class"], []), item["count"]
        terms.append(("count", _closeness(len(boxes), count)))
        right = len(boxes) == count
        if not right and ("color" in item or "position" in item):
            terms.append(("colour" if "color" in item else "position", 0.0))
        if right and "color" in item:
            coloured = sum(colour == item["color"] for colour in colour_of(item["class"], boxes))
            terms.append(("colour", _closeness(coloured, count)))
            right = coloured == count
        if right and "position" in item:
            right = _placed(boxes, item["position"], groups)
            terms.append(("position", float(right)))
        groups.append(boxes if right else None)
    return terms


def _relaxed(include: Sequence[Mapping[str, Any]], detections: Detections, colour_of: ColourOf) -> bool:
    groups: list[Sequence[Box] | None] = []
    for item in include:
        boxes = detections.get(item["class"], [])[: item["count"]]
        right = len(boxes) == item["count"]
        if right and "color" in item:
            right = list(colour_of(item["class"], boxes)).count(item["color"]) >= item["count"]
        if right and "position" in item:
            right = _placed(boxes, item["position"], groups)
        groups.append(boxes if right else None)
    return None not in groups


def _placed(boxes: Sequence[Box], position: Sequence[Any], groups: Sequence[Sequence[Box] | None]) -> bool:
    relation, index = position
    others = groups[index]
    return others is not None and all(relation in relations(a, b) for a in boxes for b in others)


def _closeness(number: int, asked: int) -> float:
    return max(0.0, 1 - abs(number - asked) / asked)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


MOVED = 0.01  # the smallest share of an offset along the requested axis that counts as a move
STILL = 10.0  # degrees; a smaller turn counts as none
SIDE = 64  # of the normalised masks, in pixels
COARSE = 5  # degrees between the angles that are tried first
DIRECTIONS = {"left": (0, 1), "right": (0, -1), "up": (1, 1), "down": (1, -1)}


def displacement_score(before: Box, after: Box, direction: str) -> float:
    """How purely a thing moved in a direction, in [0, 1]: the share of its offset along that axis; 0 for the other way.

    How far does not count. `direction` is `left`, `right`, `up` or `down`.
    """
    axis, sign = DIRECTIONS[direction]
    along = sign * offset(before, after)[axis]
    return along if along > MOVED else 0.0


def position_score(before: Box, after: Box) -> float:
    """How well a thing stayed where it was, in (0, 1]: 1 - (|x| + |y|) / 2 of its relative offset."""
    x, y = offset(before, after)
    return 1 - (abs(x) + abs(y)) / 2


def scale_score(before: Box, after: Box, factor: float, bigger: bool) -> float:
    """1 - (|w - factor| + |h - factor|) / 4 with w, h the ratios of width and height, after over before if `bigger`.

    `factor` is how many times bigger, or otherwise smaller, the thing should have become. At most 1, unbounded below.
    """
    first, second = (before, after) if bigger else (after, before)
    width = (second.right - second.left) / max(first.right - first.left, 1e-9)
    height = (second.bottom - second.top) / max(first.bottom - first.top, 1e-9)
    return 1 - (abs(width - factor) + abs(height - factor)) / 4


def rotation_score(right_axis: bool, right_direction: bool, angle: float, target: float) -> float:
    """(axis + direction - direction |angle - target| / 180) / 3, in [0, 2/3]; 0 for an angle below 10 degrees.

    `angle` and `target` are sizes in [0, 180]. Both terms are 1 or 0.
    """
    if abs(angle) < STILL:
        return 0.0
    return (right_axis + right_direction - right_direction * abs(angle - target) / 180) / 3


def turn_score(angle: float, target: float, right_axis: bool = True) -> float:
    """How well a turn fits the requested one, both signed, in [0, 1].

    1.5 times `rotation_score`, whose largest value is 2/3. Half a turn has no direction.
    """
    same_way = angle * target > 0 or abs(target) >= 180
    return 1.5 * rotation_score(right_axis, same_way, abs(angle), abs(target))


def wrapped(degrees: float) -> float:
    """Angle turned into (-180, 180]."""
    return 180 - (180 - degrees) % 360


def turn_between(before: np.ndarray, after: np.ndarray) -> float:
    """The turn in (-180, 180] that best maps the mask `before` to `after` (bool [H, W]), centred and at equal size.

    The best one has the largest intersection over union; of equals it is the smallest. It is ambiguous for a shape that
    looks the same after a turn: within 45 degrees for a square, 0 for a disc. Accurate to about 1 degree for masks of
    30 pixels or more. Raises ValueError for an empty mask.
    """
    first, second = normalised(before), normalised(after)
    still = Image.fromarray(first)

    def fit(angle: float) -> tuple[float, float]:
        turned = np.asarray(still.rotate(-angle, Image.Resampling.BILINEAR)) > 127
        target = second > 127
        union = (turned | target).sum()
        # Rounded, so that a difference of a few pixels does not decide between angles that fit alike.
        return (round(float((turned & target).sum() / union), 3) if union else 0.0), -abs(angle)

    # In two passes, 72 + 11 rotations instead of 360: a few degrees change the overlap little.
    best = max(range(-180 + COARSE, 181, COARSE), key=fit)
    turn = max(range(best - COARSE, best + COARSE + 1), key=fit)
    return float(wrapped(turn))


def normalised(mask: np.ndarray) -> np.ndarray:
    """A mask centred on its centre of mass, its mean distance from there a fifth of the side: uint8 [64, 64].

    Raises ValueError for an empty mask.
    """
    rows, columns = np.nonzero(mask)
    if len(rows) == 0:
        raise ValueError("an empty mask has no turn")
    y, x = rows.mean(), columns.mean()
    spread = float(np.hypot(rows - y, columns - x).mean()) or 1.0
    step = spread / (0.2 * SIDE)
    half = (SIDE - 1) / 2
    # From a pixel of the output to its position in the mask.
    transform = (step, 0, x + 0.5 - step * (half + 0.5), 0, step, y + 0.5 - step * (half + 0.5))
    picture = Image.fromarray(mask.astype(np.uint8) * 255)
    return np.asarray(picture.transform((SIDE, SIDE), Image.Transform.AFFINE, transform, Image.Resampling.BILINEAR))


def distance(before: Box, after: Box, width: int, height: int) -> float:
    """How far the centre moved, as a share of the diagonal of the picture, which is `width` x `height` pixels."""
    x = (after.left + after.right - before.left - before.right) / 2
    y = (after.top + after.bottom - before.top - before.bottom) / 2
    return math.hypot(x, y) / math.hypot(width, height)
