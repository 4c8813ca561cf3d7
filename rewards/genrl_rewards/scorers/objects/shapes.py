"""Rule-based checker of the embedded world: are the requested shapes there, in number, colour and place?

The world (rendered by `genrl.playground.shapes`) shows circles, squares, triangles and stars of five colours on a plain
background. The checker finds them without any model: by nearest palette colour, connected components, and the
intersection over union of each component with the ideal outlines. It needs NumPy and Pillow only.

This module defines what both sides must agree on: palette, outlines, and the grammar of the captions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from genrl_rewards.contract import Scored
from genrl_rewards.pictures import to_uint8
from genrl_rewards.scorers.objects.counted import BACKGROUND as BACKGROUND
from genrl_rewards.scorers.objects.counted import by_caption, credit
from genrl_rewards.scorers.texts.verifiable import answer_in

if TYPE_CHECKING:
    import torch

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "green": (38, 160, 70),
    "blue": (40, 86, 214),
    "yellow": (247, 200, 38),
    "purple": (132, 64, 158),
}
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "star")
NUMBERS = {"a": 1, "one": 1, "two": 2, "three": 3, "four": 4}
RELATIONS = ("to the left of", "to the right of", "above", "below")

COLOUR_DISTANCE = 75.0  # a pixel farther than this from every palette colour (RGB, 0-255) has no colour of the world
MIN_AREA = 40 / 4096  # of the picture; smaller components are specks
MIN_IOU = 0.68  # with the best-fitting outline; a component with less has no shape
MASK = 24  # side of the normalised mask, in pixels


@dataclass(frozen=True)
class Group:
    """A number of things of one colour and shape."""

    count: int
    colour: str
    shape: str


@dataclass(frozen=True)
class Asked:
    """What a caption asks for: one or two groups, and where the first is relative to the second."""

    groups: tuple[Group, ...]
    relation: str | None = None


@dataclass(frozen=True)
class Detection:
    """One component of a picture: its colour, shape (None if no outline fits), centre and area in pixels."""

    colour: str
    shape: str | None
    x: float
    y: float
    area: int


def outline(shape: str) -> np.ndarray:
    """Corners [K, 2] of a shape of unit size around (0, 0), y downwards. Raises ValueError for an unknown shape."""
    if shape == "circle":
        angles, radii = np.arange(64) * (2 * np.pi / 64), np.ones(64)
    elif shape == "square":
        angles, radii = np.pi / 4 + np.arange(4) * np.pi / 2, np.full(4, 1.15)
    elif shape == "triangle":
        angles, radii = -np.pi / 2 + np.arange(3) * (2 * np.pi / 3), np.full(3, 1.2)
    elif shape == "star":
        angles, radii = -np.pi / 2 + np.arange(10) * np.pi / 5, np.tile([1.25, 0.56], 5)
    else:
        raise ValueError(f"no shape called {shape!r}: the world has {', '.join(SHAPES)}")
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def _group_pattern(k: int) -> str:
    words = {"n": NUMBERS, "colour": COLOURS, "shape": SHAPES}
    return (
        " ".join(rf"(?P<{name}{k}>{'|'.join(words_known)})" for name, words_known in words.items()) + rf"(?P<s{k}>s?)"
    )


_CAPTION = re.compile(rf"{_group_pattern(1)}(?: (?P<link>and|{'|'.join(RELATIONS)}) {_group_pattern(2)})?")


@lru_cache(maxsize=65536)
def parse(caption: str) -> Asked | None:
    """Read a caption of the world's grammar; None if it is not one (or its two groups are the same).

    `a red circle`, `three purple stars`, `two red circles and a blue square`,
    `a green triangle to the left of a yellow star` (also: to the right of, above, below).
    """
    match = _CAPTION.fullmatch(" ".join(caption.lower().rstrip(". ").split()))
    if match is None:
        return None
    numbers = [k for k in (1, 2) if match[f"n{k}"]]
    groups = tuple(Group(NUMBERS[match[f"n{k}"]], match[f"colour{k}"], match[f"shape{k}"]) for k in numbers)
    plural = all((group.count > 1) == bool(match[f"s{k}"]) for k, group in zip(numbers, groups, strict=True))
    distinct = len({(group.colour, group.shape) for group in groups}) == len(groups)
    return Asked(groups, match["link"] if match["link"] != "and" else None) if plural and distinct else None


def find(image: np.ndarray) -> list[Detection]:
    """Every component of a palette colour with at least `MIN_AREA`. image: uint8 [H, W, 3]."""
    return [thing for thing, _ in located(image)]


def located(image: np.ndarray) -> list[tuple[Detection, np.ndarray]]:
    """Find things as `find` does, each with its pixels, bool [H, W]."""
    height, width, _ = image.shape
    labels, areas, colours = _components(_nearest_colour(image))
    things = []
    for label in np.flatnonzero(areas >= MIN_AREA * height * width):
        mask = labels == label
        rows, columns = np.nonzero(mask)
        thing = Detection(
            colour=COLOURS[colours[label]],
            shape=_shape_of(rows, columns),
            x=float(columns.mean()),
            y=float(rows.mean()),
            area=int(areas[label]),
        )
        things.append((thing, mask))
    return things


_PALETTE = np.array(list(PALETTE.values()), dtype=np.float32)


def _nearest_colour(image: np.ndarray) -> np.ndarray:
    """Index of the nearest palette colour, [H, W]; -1 where none is within `COLOUR_DISTANCE`."""
    pixels = image.reshape(-1, 3).astype(np.float32)
    distance = (pixels**2).sum(1, keepdims=True) - 2 * pixels @ _PALETTE.T + (_PALETTE**2).sum(1)
    nearest = distance.argmin(1)
    far = distance[np.arange(len(nearest)), nearest] > COLOUR_DISTANCE**2
    return np.where(far, -1, nearest).reshape(image.shape[:2])


def _components(classes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """4-connected components of equal class (-1 = none): labels [H, W], their areas (0 for no class) and classes.

    Runs along the rows are joined by union-find: as fast here as compiled labelling, without the dependency.
    """
    height, width = classes.shape
    starts = np.ones((height, width), dtype=bool)
    starts[:, 1:] = classes[:, 1:] != classes[:, :-1]
    run = np.cumsum(starts).reshape(height, width) - 1
    touching = (classes[1:] == classes[:-1]) & (classes[1:] >= 0)
    pairs = {(int(a), int(b)) for a, b in zip(run[:-1][touching], run[1:][touching], strict=True)}
    kinds = classes[starts]
    parent = list(range(len(kinds)))
    for a, b in pairs:
        while parent[a] != a:
            a = parent[a]
        while parent[b] != b:
            b = parent[b]
        # Towards the smaller number always, so that a parent comes before its children.
        parent[max(a, b)] = min(a, b)
    for i, p in enumerate(parent):  # parents come first, so that one pass flattens every chain
        parent[i] = parent[p]
    roots, label_of_run = np.unique(np.array(parent), return_inverse=True)
    labels = label_of_run[run]
    areas = np.bincount(labels.ravel(), minlength=len(roots))
    areas[kinds[roots] < 0] = 0
    return labels, areas, kinds[roots]


@lru_cache(maxsize=1)
def _templates() -> np.ndarray:
    """The outlines as masks [4, MASK * MASK], normalised as components are."""
    masks = []
    for shape in SHAPES:
        canvas = Image.new("1", (256, 256))
        ImageDraw.Draw(canvas).polygon([(128 + 80 * x, 128 + 80 * y) for x, y in outline(shape)], fill=1)
        masks.append(_normalised(*np.nonzero(np.asarray(canvas))).ravel())
    return np.stack(masks)


def _normalised(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The component's mask as bool [MASK, MASK], its longer side filling the square, its proportions kept."""
    top, left = rows.min(), columns.min()
    height, width = rows.max() - top + 1, columns.max() - left + 1
    side = max(height, width)
    mask = np.zeros((side, side), dtype=bool)
    # In a square, or a flat shape would be stretched into another one.
    mask[rows - top + (side - height) // 2, columns - left + (side - width) // 2] = True
    take = ((np.arange(MASK) + 0.5) * side / MASK).astype(np.intp)
    return mask[np.ix_(take, take)]


def _shape_of(rows: np.ndarray, columns: np.ndarray) -> str | None:
    mask = _normalised(rows, columns).ravel()
    templates = _templates()
    overlap = (templates & mask).sum(1) / (templates | mask).sum(1)
    best = int(overlap.argmax())
    return SHAPES[best] if overlap[best] >= MIN_IOU else None


def check(image: np.ndarray, asked: Asked) -> dict[str, float]:
    """Score one picture (uint8 [H, W, 3]) against what was requested. Every part is in [0, 1].

    soft: mean over groups of max(0, 1 - |found - asked| / asked), times asked / (asked + extra), where `extra`
      counts components that belong to no requested group; a relation has a weight of `POSITION_WEIGHT` in it.
    strict: 1 if every group is there in its exact number, nothing else is, and the relation holds; else 0.
    count, colour, shape: the number of things, their colours, their shapes, each independent of the rest.
    position: 1 if the relation holds between the largest thing of each group, 0 if not or one is missing; NaN if no
      relation was requested.
    """
    things = find(image)
    total = sum(group.count for group in asked.groups)
    members = [[f for f in things if (f.colour, f.shape) == (g.colour, g.shape)] for g in asked.groups]
    extra = len(things) - sum(len(m) for m in members)
    position = math.nan
    if asked.relation is not None:
        position = float(_relation_holds(members[0], members[1], asked.relation))
    counts = [len(m) for m in members], [group.count for group in asked.groups]
    soft, strict = credit(*counts, extra, position)
    return {
        "soft": soft,
        "strict": strict,
        "count": max(0.0, 1 - abs(len(things) - total) / total),
        "colour": _agreement([f.colour for f in things], [g.colour for g in asked.groups for _ in range(g.count)]),
        "shape": _agreement([f.shape for f in things], [g.shape for g in asked.groups for _ in range(g.count)]),
        "position": position,
    }


def _agreement(detected: Sequence[str | None], asked: Sequence[str]) -> float:
    """Size of the intersection of two multisets over the size of the larger."""
    common = sum(min(detected.count(name), asked.count(name)) for name in set(asked))
    return common / max(len(detected), len(asked))


def _relation_holds(first: list[Detection], second: list[Detection], relation: str) -> bool:
    """Whether the offset points in the requested direction more than along the other axis."""
    if not first or not second:
        return False
    a, b = (max(things, key=lambda thing: thing.area) for things in (first, second))
    dx, dy = a.x - b.x, a.y - b.y
    along, across = {
        "to the left of": (-dx, dy),
        "to the right of": (dx, dy),
        "above": (-dy, dx),
        "below": (dy, dx),
    }[relation]
    return along > abs(across)


def alike(first: Sequence[Detection], second: Sequence[Detection]) -> float:
    """Degree to which two pictures show the same things in the same sizes, at any positions, in [0, 1]; symmetric.

    Things of one colour and shape are paired from the largest down. A pair counts with its smaller area over its larger
    one, a thing without a partner with 0; the sum is divided by the number of things in the fuller picture. NaN if both
    are empty.
    """
    areas: list[dict[tuple[str, str | None], list[int]]] = [{}, {}]
    for kinds, things in zip(areas, (first, second), strict=True):
        for thing in things:
            kinds.setdefault((thing.colour, thing.shape), []).append(thing.area)
    common = 0.0
    for kind in areas[0].keys() & areas[1].keys():
        ours, theirs = (sorted(kinds[kind], reverse=True) for kinds in areas)
        common += sum(min(a, b) / max(a, b) for a, b in zip(ours, theirs, strict=False))
    fuller = max(len(first), len(second))
    return common / fuller if fuller else math.nan


class SameShapes:
    """Do the pictures of a prompt show the same things in the same sizes? By rules of the embedded world, in [0, 1].

    Pairwise (`alike`). Whether they show what the prompt asks for does not matter.
    """

    def __call__(self, images: torch.Tensor, pairs: list[tuple[int, int]]) -> list[float]:
        """images: float tensor [N, 3, H, W] in [0, 1]; one number per pair."""
        things = [find(picture) for picture in to_uint8(images)]
        return [alike(things[i], things[j]) for i, j in pairs]


PARTS = ("soft", "strict", "count", "colour", "shape", "position")


class Shapes:
    """Count, colour, shape and position in the embedded world, by rules, for captions like "two red stars"; in [0, 1].

    The score is the soft one (partial credit), or with `strict` 1 for a completely right picture and 0 otherwise; all
    parts of `check` are reported, too. A caption outside the grammar has no score. About 0.3 ms per picture of 64
    x 64 pixels on one CPU core.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def __call__(self, images: torch.Tensor, prompts: list[str]) -> Scored:
        """images: float tensor [N, 3, H, W] in [0, 1]; prompts: N captions."""
        return by_caption(images, prompts, parse, check, PARTS, strict=self.strict)


def same_number(completions: list[str], answer: list[str]) -> list[float]:
    """1 if the answer is a caption of this world that asks for `answer` things: a description that keeps a count."""

    def number(completion: str) -> int | None:
        caption = parse(answer_in(completion) or "")
        return None if caption is None or caption.relation else sum(group.count for group in caption.groups)

    return [float(str(number(text)) == str(truth)) for text, truth in zip(completions, answer, strict=True)]
