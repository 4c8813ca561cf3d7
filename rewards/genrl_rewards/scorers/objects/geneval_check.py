"""Are the requested objects there, in number, colour and place? GenEval's rules (arXiv 2310.11513) on detections.

Nothing is detected here: a picture is a dictionary from class names to boxes, the most confident first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


Found = Mapping[str, Sequence[Box]]
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


def check(asked: Mapping[str, Any], found: Found, colour_of: ColourOf) -> Verdict:
    """Compare the requested objects with those found.

    `asked` is a row of GenEval's prompts: `include`, a list of {class, count, color?, position?: [relation, index of an
    earlier item]}, and perhaps `exclude`, a list of {class, count} (fewer than count must be there).
    """
    terms = _terms(asked.get("include", []), found, colour_of)
    excluded = all(len(found.get(item["class"], [])) < item["count"] for item in asked.get("exclude") or [])
    means = {kind: [value for name, value in terms if name == kind] for kind in ("count", "colour", "position")}
    return Verdict(
        relaxed=float(_relaxed(asked.get("include", []), found, colour_of) and excluded),
        strict=float(all(value == 1.0 for _, value in terms) and excluded),
        partial=_mean([value for _, value in terms]),
        count=_mean(means["count"]),
        colour=_mean(means["colour"]),
        position=_mean(means["position"]),
    )


def _terms(include: Sequence[Mapping[str, Any]], found: Found, colour_of: ColourOf) -> list[tuple[str, float]]:
    """(kind, value in [0, 1]) of everything requested.

    With a wrong number of objects, their colour or position cannot be determined and gets a single 0. With a wrong
    colour, the position is left out of the mean.
    """
    terms: list[tuple[str, float]] = []
    groups: list[Sequence[Box] | None] = []
    for item in include:
        boxes, count = found.get(item["class"], []), item["count"]
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


def _relaxed(include: Sequence[Mapping[str, Any]], found: Found, colour_of: ColourOf) -> bool:
    groups: list[Sequence[Box] | None] = []
    for item in include:
        boxes = found.get(item["class"], [])[: item["count"]]
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
