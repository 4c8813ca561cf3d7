"""Checker of the embedded world of emoji: are the requested things there, in number and place?

The world (rendered by `genrl.playground.emoji`) shows 64 of 96 glyphs of Google's Noto Emoji (`emoji.png`, made by
assets/build_emoji.py) on a plain background. Since every glyph is known, the checker compares them with the picture
at every place; no model is needed, only NumPy and Pillow.

This module defines what both sides must agree on: the glyphs and the grammar of the captions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from genrl_rewards.contract import Scored
from genrl_rewards.scorers.objects.counted import BACKGROUND as BACKGROUND
from genrl_rewards.scorers.objects.counted import by_caption, credit

if TYPE_CHECKING:
    import torch

SHEET = Path(__file__).with_suffix(".png")
SIDE = 32  # pixels of a glyph in the sheet
THINGS = {
    "animals": "cat dog mouse pig frog monkey chicken penguin turtle octopus fish elephant".split(),
    "fruit": "apple banana grapes strawberry orange lemon melon pineapple cherries pear peach kiwi".split(),
    "foods": "bread cheese pizza burger egg cookie donut rice corn carrot mushroom icecream".split(),
    "vehicles": "car bus bicycle train rocket helicopter tractor ship taxi ambulance firetruck scooter".split(),
    "clothes": "shirt trousers dress socks gloves hat shoe boot handbag scarf crown glasses".split(),
    "plants": "fir rose sunflower cactus tulip maple clover palm ricestalk hibiscus seedling daisy".split(),
    "tools": "hammer wrench key scissors lock torch magnet broom ruler magnifier ladder bucket".split(),
    "instruments": "guitar trumpet violin drum piano sax bell microphone headphones radio banjo accordion".split(),
}
NAMES = tuple(name for names in THINGS.values() for name in names)
EACH = len(NAMES) // len(THINGS)

# Eight of each kind: those with a plural, and of two that look alike at this size one.
OBJECTS = tuple(
    """
    cat dog pig frog penguin turtle octopus chicken
    apple banana strawberry lemon melon pineapple pear kiwi
    cheese pizza burger egg cookie donut carrot mushroom
    car bus bicycle train rocket tractor ship scooter
    shirt dress hat shoe boot handbag scarf crown
    fir rose sunflower cactus tulip maple clover palm
    hammer key lock torch magnet ruler ladder bucket
    guitar trumpet drum piano bell microphone radio accordion
    """.split()
)


def _plural(name: str) -> str:
    irregular = {"strawberry": "strawberries", "scarf": "scarves"}
    return irregular.get(name, name + ("es" if name.endswith(("s", "x", "ch", "sh")) else "s"))


PLURALS = {name: _plural(name) for name in OBJECTS}
_GROUND = np.array(BACKGROUND, dtype=np.float32)
PICTURE = 64  # pixels of a picture's side
GLYPH = 22  # pixels of a glyph in a picture
NUMBERS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4}
RELATIONS = ("left of", "right of", "above", "below")

MIN_MATCH = 0.85  # of a place with a glyph; with less it is nothing known. Between two different glyphs: .88 at most
MIN_DETAIL = 0.5  # of a place with the inside of a glyph, less its mean colour: blots of the right outline have 0
NEAR = 0.85  # of a glyph's side: places nearer to a thing than that, in both directions, show part of it
INK = 40.0  # a pixel farther than this from the background (RGB, 0-255) is ink
BLOB = 100  # pixels of ink outside of all things found that count as one unknown thing; fewer count as none


@dataclass(frozen=True)
class Group:
    """A number of one thing."""

    count: int
    name: str


@dataclass(frozen=True)
class Asked:
    """What a caption asks for: one to three groups, and where the first of two is relative to the second."""

    groups: tuple[Group, ...]
    relation: str | None = None


@dataclass(frozen=True)
class Detection:
    """A glyph in a picture: its name, its centre in pixels (y downwards) and how well it fits, at most 1."""

    name: str
    x: float
    y: float
    match: float


@cache
def sheet_glyphs() -> tuple[Image.Image, ...]:
    """Every glyph of the sheet, in the order of `NAMES`, RGBA [SIDE, SIDE]."""
    with Image.open(SHEET) as sheet:
        pixels = sheet.convert("RGBA")
    places = [(SIDE * (k % EACH), SIDE * (k // EACH)) for k in range(len(NAMES))]
    return tuple(pixels.crop((x, y, x + SIDE, y + SIDE)) for x, y in places)


@cache
def glyph(name: str) -> np.ndarray:
    """Draw a thing as the world does, on its background: uint8 [GLYPH, GLYPH, 3]. Raises ValueError for another
    name."""
    if name not in OBJECTS:
        raise ValueError(f"no thing called {name!r}: the world has {', '.join(OBJECTS)}")
    ground = Image.new("RGBA", (SIDE, SIDE), BACKGROUND)
    ground.alpha_composite(sheet_glyphs()[NAMES.index(name)])
    # On the background first: of transparent pixels the colour is arbitrary, and resizing would mix it in.
    return np.array(ground.convert("RGB").resize((GLYPH, GLYPH), Image.Resampling.BOX))


_THING = {name: name for name in OBJECTS} | {plural: name for name, plural in PLURALS.items()}
_PHRASE = rf"({'|'.join(NUMBERS)}) ({'|'.join(sorted(_THING, key=len, reverse=True))})"
_CAPTION = re.compile(rf"{_PHRASE}(?: ({'|'.join(RELATIONS)}) {_PHRASE}|(?:, {_PHRASE})? and {_PHRASE})?")


@lru_cache(maxsize=65536)
def parse(caption: str) -> Asked | None:
    """Read a caption of the world's grammar; None if it is not one, or names a thing twice.

    `an apple`, `three cats`, `two cats and a dog`, `a cat left of two dogs` (also: right of, above, below),
    `a cat, two dogs and an apple`.
    """
    match = _CAPTION.fullmatch(" ".join(caption.lower().rstrip(". ").split()))
    if match is None:
        return None
    words = match.groups()
    phrases = [words[i : i + 2] for i in (0, 3, 5, 7) if words[i]]
    groups = tuple(Group(NUMBERS[number], _THING[word]) for number, word in phrases)
    agree = all((NUMBERS[number] > 1) == (word in PLURALS.values()) for number, word in phrases)
    distinct = len({group.name for group in groups}) == len(groups)
    return Asked(groups, words[2]) if agree and distinct else None


@lru_cache(maxsize=2)
def _templates(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Templates of the glyphs less the background: conjugate spectra [K, 3, height, width // 2 + 1], squared norms
    [K]."""
    glyphs = np.stack([glyph(name) for name in OBJECTS]).astype(np.float32) - _GROUND
    spectra = np.fft.rfft2(glyphs.transpose(0, 3, 1, 2), s=(height, width)).conj().astype(np.complex64)
    return spectra, (glyphs**2).sum((1, 2, 3))


def match(image: np.ndarray) -> np.ndarray:
    """How well each glyph fits at each place, [K, H - GLYPH + 1, W - GLYPH + 1]; 1: the same, 0: nothing is there.

    With the window w and the glyph g, both less the background: 2 w.g / (w.w + g.g). That is the normalised
    correlation, times 2 r / (1 + r^2) for windows whose contrast is r times the glyph's. image: uint8 [H, W, 3].
    """
    height, width, _ = image.shape
    spectra, squares = _templates(height, width)
    ink = (image.astype(np.float32) - _GROUND).transpose(2, 0, 1)
    # All places at once; those at which a glyph wraps around the border are cut off below.
    products = np.fft.irfft2((np.fft.rfft2(ink) * spectra).sum(1), s=(height, width))
    # A summed-area table: the squares of every window by four look-ups. In float64, since differences of large sums
    # follow.
    sums = np.pad(np.square(ink, dtype=np.float64).sum(0).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    norms = sums[GLYPH:, GLYPH:] - sums[:-GLYPH, GLYPH:] - sums[GLYPH:, :-GLYPH] + sums[:-GLYPH, :-GLYPH]
    fits: np.ndarray = 2 * products[:, : norms.shape[0], : norms.shape[1]] / (norms + squares[:, None, None])
    return fits


@cache
def _inside(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Mask of a glyph's ink, bool [GLYPH, GLYPH], and its N colours there less their mean, [N, 3]."""
    pixels = glyph(name).astype(np.float32)
    ink = np.linalg.norm(pixels - _GROUND, axis=-1) > INK
    return ink, pixels[ink] - pixels[ink].mean(0)


def detail(window: np.ndarray, name: str) -> float:
    """How well the inside of a glyph fits, whatever its outline and mean colour: `match` of what differs from the mean.

    window: uint8 [GLYPH, GLYPH, 3].
    """
    ink, pixels = _inside(name)
    centred = window[ink] - window[ink].mean(0)
    return float(2 * (centred * pixels).sum() / (np.square(centred).sum() + np.square(pixels).sum()))


def find(image: np.ndarray) -> list[Detection]:
    """The glyphs of a picture, best first: each the best fit of at least `MIN_MATCH` away from those before it, whose
    inside fits by at least `MIN_DETAIL`. None in a picture that is smaller than a glyph."""
    if min(image.shape[:2]) < GLYPH:
        return []
    fits = match(image)
    best = fits.max(0)
    things = []
    reach, middle = math.ceil(NEAR * GLYPH), (GLYPH - 1) / 2
    while best.max() >= MIN_MATCH:
        row, column = (int(i) for i in np.unravel_index(best.argmax(), best.shape))
        which = int(fits[:, row, column].argmax())
        near = slice(max(0, row - reach + 1), row + reach), slice(max(0, column - reach + 1), column + reach)
        if detail(image[row : row + GLYPH, column : column + GLYPH], OBJECTS[which]) >= MIN_DETAIL:
            things.append(Detection(OBJECTS[which], column + middle, row + middle, float(best[row, column])))
        best[near] = -1  # what fits best there and lacks its detail is a blot, and no other glyph either
    return things


def unknown(image: np.ndarray, detections: list[Detection]) -> int:
    """How many things of no known kind there are: the ink outside of those found, in parts of `BLOB` pixels."""
    ink = np.linalg.norm(image.astype(np.float32) - _GROUND, axis=-1) > INK
    for thing in detections:
        top, left = (round(centre - (GLYPH - 1) / 2) for centre in (thing.y, thing.x))
        # A pixel more on each side: decoders blur edges into it.
        ink[max(0, top - 1) : top + GLYPH + 1, max(0, left - 1) : left + GLYPH + 1] = False
    return int(ink.sum()) // BLOB


def check(image: np.ndarray, asked: Asked) -> dict[str, float]:
    """Score one picture (uint8 [H, W, 3]) against what was requested. Every part is in [0, 1].

    soft: mean over groups of max(0, 1 - |found - asked| / asked), times asked / (asked + extra), where `extra`
      counts the other things, unknown ones included; a relation has a weight of `POSITION_WEIGHT` in it.
    strict: 1 if every group is there in its exact number, nothing else is, and the relation holds; else 0.
    count: the number of things. objects: which things, as often as asked.
    position: 1 if all things of the first group lie so relative to all of the second, 0 if not or one group is
      missing; NaN if no relation was requested.
    """
    things = find(image)
    blobs = unknown(image, things)
    total = sum(group.count for group in asked.groups)
    members = [[thing for thing in things if thing.name == group.name] for group in asked.groups]
    extra = len(things) + blobs - sum(len(m) for m in members)
    position = math.nan
    if asked.relation is not None:
        position = float(_relation_holds(members[0], members[1], asked.relation))
    counts = [len(m) for m in members], [group.count for group in asked.groups]
    soft, strict = credit(*counts, extra, position)
    expected = Counter({group.name: group.count for group in asked.groups})
    common = (expected & Counter(thing.name for thing in things)).total()
    return {
        "soft": soft,
        "strict": strict,
        "count": max(0.0, 1 - abs(len(things) + blobs - total) / total),
        "objects": common / max(len(things) + blobs, total),
        "position": position,
    }


def _relation_holds(first: list[Detection], second: list[Detection], relation: str) -> bool:
    """Whether everything of the first lies at least half a glyph beyond everything of the second."""
    if not first or not second:
        return False
    direction = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}[relation]
    ours, theirs = ([thing.x * direction[0] + thing.y * direction[1] for thing in group] for group in (first, second))
    return min(ours) - max(theirs) >= GLYPH / 2


PARTS = ("soft", "strict", "count", "objects", "position")


class Emoji:
    """Which things, how many and where, in the embedded world of emoji, by its glyphs; "two cats above a dog"; 0 to 1.

    The score is the soft one (partial credit), or with `strict` 1 for a completely right picture and 0 otherwise; all
    parts of `check` are reported, too. A caption outside the grammar has no score.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def __call__(self, images: torch.Tensor, prompts: list[str]) -> Scored:
        """images: float tensor [N, 3, H, W] in [0, 1]; prompts: N captions."""
        return by_caption(images, prompts, parse, check, PARTS, strict=self.strict)
