"""A small world of captioned pictures: coloured shapes, and words on a sign. NumPy and Pillow only.

The embedded models are trained on it, prompt files and references come from it, and
`genrl_rewards.scorers.objects.shapes` recognises it. Everything is a pure function of an explicit
`numpy.random.Generator`.

    rng = numpy.random.default_rng(0)
    scene = sample_scene(rng)
    caption(scene), draw(scene)          # 'two red circles and a blue square', uint8 [64, 64, 3]

Splits. A *combination* is (count, colour, shape); two in five are held out (`held_out`). A "train" scene has none of
them, an "eval" scene at least one, and "all" asks for neither (the embedded models' pre-training). Every fourth word
of `WORDS` is held out: "eval" signs show those, "train" and "all" signs never do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from genrl_rewards.scorers.objects.shapes import BACKGROUND, COLOURS, PALETTE, RELATIONS, SHAPES, Group, outline, parse

Split = Literal["train", "eval", "all"]
Kind = Literal["single", "count", "two", "position", "mixed", "word"]

SIZE = 64  # pixels; all coordinates are given for this size
SHAPE_KINDS: dict[Kind, float] = {"single": 1, "count": 2, "two": 2, "position": 3, "mixed": 2}
WORD_SHARE = 0.38  # of all scenes, unless told otherwise
LIST_SHARE = 0.4  # of the signs show a word of the list, the rest random letters
MIXED_COUNTS = ((1, 2), (2, 1), (1, 3), (3, 1), (2, 2))
NUMBER_WORDS = {1: "a", 2: "two", 3: "three", 4: "four"}
SIGN_COLOURS = {"white": (255, 255, 255)} | {name: PALETTE[name] for name in ("red", "green", "blue", "yellow")}
DARK = (20, 24, 34)
FRAME = (46, 54, 84)
# The grammar's own words are not among them: they would be read as one token instead of as letters.
WORDS = tuple(
    """
    ANT ARM ART BAG BAT BED BEE BIN BOX BUS CAN CAP CAR CAT COW CUP DOG EAR EGG EYE FAN FLY FOX GAS GYM HAT
    HEN ICE INK JAM JAR KEY LEG MAP NET NUT OAK OWL PEN PIG POT RAT SEA SKY SUN TAP TEA TOY VAN ZOO
    BANK BATH BEAR BELL BIRD BOAT BOOK CAFE CAKE COAT CODE COIN CORN DESK DOOR DUCK EXIT FARM FIRE FISH FOOD FROG
    GATE GOLD HAND HILL HOME HOPE HORN IRON JAZZ KING KITE LAMP LEAF LIME LINE LION LOVE MILK MOON NEST OPEN PARK
    PATH POND POST RAIN ROAD ROCK ROSE SALE SALT SAND SHIP SHOP SNOW SOAP SOFA SOUP TAXI TREE WIND WOLF WORK ZERO
    """.split()
)
# Tokens of their own in the embedded models; "a" needs none, it is a single byte.
GRAMMAR = tuple(
    sorted(
        {"two", "three", "four", "and", "to", "the", "left", "right", "of", "above", "below", "sign", "that", "says"}
        | {*COLOURS, "white", *SHAPES}
        | {f"{shape}s" for shape in SHAPES}
    )
)


@dataclass(frozen=True)
class Thing:
    """One shape: centre and size in pixels of a 64 x 64 picture, y downwards."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Sign:
    """A sign with 3 or 4 capitals; x and y shift it from the middle, in pixels."""

    text: str
    colour: str
    x: float
    y: float


@dataclass(frozen=True)
class Scene:
    """A picture's content. Shapes: `things` realise `groups` in order; words: only `sign` is set."""

    kind: Kind
    things: tuple[Thing, ...] = ()
    groups: tuple[Group, ...] = ()
    relation: str | None = None
    sign: Sign | None = None


def held_out(group: Group) -> bool:
    """Whether this combination of count, colour and shape is kept out of RL training prompts."""
    return (COLOURS.index(group.colour) + SHAPES.index(group.shape) + group.count) % 5 < 2


def words(split: Split) -> tuple[str, ...]:
    """The words of a split: every fourth is held out for "eval"; "all" is the same as "train"."""
    return tuple(word for i, word in enumerate(WORDS) if (i % 4 == 3) == (split == "eval"))


def sample_scene(
    rng: np.random.Generator, kind: Kind | None = None, split: Split = "train", word_share: float = WORD_SHARE
) -> Scene:
    """Sample a scene; without `kind`, `word_share` of them are signs, the rest shapes in proportions `SHAPE_KINDS`."""
    if kind is None:
        weights = np.array(list(SHAPE_KINDS.values()))
        shape_kind = list(SHAPE_KINDS)[rng.choice(len(weights), p=weights / weights.sum())]
        kind = "word" if rng.random() < word_share else shape_kind
    if kind == "word":
        text = _word(rng, split)
        colour = list(SIGN_COLOURS)[rng.integers(len(SIGN_COLOURS))]
        return Scene(kind, sign=Sign(text, colour, float(rng.uniform(-1, 1)), float(rng.uniform(-2, 2))))
    groups, relation = _sample_groups(rng, kind, split)
    return Scene(kind, place(rng, groups, relation), groups, relation)


def _word(rng: np.random.Generator, split: Split) -> str:
    listed = words(split)
    if split == "eval" or rng.random() < LIST_SHARE:
        return listed[rng.integers(len(listed))]
    forbidden = {*words("eval"), *(word.upper() for word in GRAMMAR)}
    while True:
        text = "".join(chr(65 + i) for i in rng.integers(26, size=rng.integers(3, 5)))
        if text not in forbidden:
            return text


def _sample_groups(rng: np.random.Generator, kind: Kind, split: Split) -> tuple[tuple[Group, ...], str | None]:
    """Combinations of one kind that belong to the split, and the relation where the kind has one."""
    while True:
        if kind == "single":
            counts: tuple[int, ...] = (1,)
        elif kind == "count":
            counts = (int(rng.integers(2, 5)),)
        elif kind == "mixed":
            counts = MIXED_COUNTS[rng.integers(len(MIXED_COUNTS))]
        else:
            counts = (1, 1)
        picks = rng.choice(len(COLOURS) * len(SHAPES), size=len(counts), replace=False)
        groups = tuple(
            Group(count, COLOURS[pick % len(COLOURS)], SHAPES[pick // len(COLOURS)])
            for count, pick in zip(counts, picks, strict=True)
        )
        relation = RELATIONS[rng.integers(len(RELATIONS))] if kind == "position" else None
        if split == "all" or any(map(held_out, groups)) == (split == "eval"):
            return groups, relation


def place(rng: np.random.Generator, groups: tuple[Group, ...], relation: str | None) -> tuple[Thing, ...]:
    """Random centres and sizes: inside the picture, apart from each other, and as the relation wants."""
    kinds = [(group.colour, group.shape) for group in groups for _ in range(group.count)]
    while True:
        radii = rng.uniform(8, 10.5, size=len(kinds))
        centres = [rng.uniform(1.2 * r + 1, SIZE - 1.2 * r - 1, size=2) for r in radii]
        if not _apart(centres, radii) or (relation and not clearly(relation, centres[0], centres[1])):
            continue
        return tuple(
            Thing(colour, shape, float(c[0]), float(c[1]), float(r))
            for (colour, shape), c, r in zip(kinds, centres, radii, strict=True)
        )


def _apart(centres: list[np.ndarray], radii: np.ndarray) -> bool:
    pairs = [(i, j) for i in range(len(radii)) for j in range(i)]
    return all(np.hypot(*(centres[i] - centres[j])) >= 1.08 * (radii[i] + radii[j]) + 4 for i, j in pairs)


def clearly(relation: str, first: np.ndarray, second: np.ndarray) -> bool:
    dx, dy = first - second
    along, across = {
        "to the left of": (-dx, dy),
        "to the right of": (dx, dy),
        "above": (-dy, dx),
        "below": (dy, dx),
    }[relation]
    return bool(along > 1.3 * abs(across) + 2)


def caption(scene: Scene) -> str:
    """What the scene shows, in words; `genrl_rewards.scorers.objects.shapes.parse` reads those of shapes back."""
    if scene.sign is not None:
        return f'a {scene.sign.colour} sign that says "{scene.sign.text}"'
    return f" {scene.relation or 'and'} ".join(_phrase(group) for group in scene.groups)


def kind_of(text: str) -> Kind | None:
    """The kind of scene that a caption of the world's grammar asks for; None for any other text."""
    if re.fullmatch(r'an? \w+ sign that says "\w+"', text):
        return "word"
    request = parse(text)
    if request is None:
        return None
    several = any(group.count > 1 for group in request.groups)
    if len(request.groups) == 1:
        return "count" if several else "single"
    return "position" if request.relation else "mixed" if several else "two"


def _phrase(group: Group) -> str:
    return f"{NUMBER_WORDS[group.count]} {group.colour} {group.shape}{'s' if group.count > 1 else ''}"


def draw(scene: Scene, size: int = SIZE) -> np.ndarray:
    """The rendered picture, uint8 [size, size, 3]: at twice the size, then box-filtered."""
    canvas = Image.new("RGB", (2 * size, 2 * size), BACKGROUND)
    scale = 2 * size / SIZE
    pen = ImageDraw.Draw(canvas)
    for thing in scene.things:
        corners = scale * (outline(thing.shape) * thing.radius + (thing.x, thing.y))
        pen.polygon([(float(x), float(y)) for x, y in corners], fill=PALETTE[thing.colour])
    if scene.sign is not None:
        _draw_sign(canvas, pen, scene.sign, scale)
    return np.array(canvas.reduce(2))


def _draw_sign(canvas: Image.Image, pen: ImageDraw.ImageDraw, sign: Sign, scale: float) -> None:
    x, y = SIZE / 2 + sign.x, SIZE / 2 + sign.y
    box = [scale * edge for edge in (x - 30, y - 15, x + 30, y + 15)]
    face = SIGN_COLOURS[sign.colour]
    pen.rounded_rectangle(box, radius=3 * scale, fill=face, outline=FRAME, width=round(scale))
    ink = DARK if sign.colour in ("white", "yellow") else (255, 255, 255)
    for i, letter in enumerate(sign.text):
        mask = _glyph(letter, round(12.5 * scale), round(17 * scale))
        left = scale * (x + 14 * (i - (len(sign.text) - 1) / 2)) - mask.width / 2
        canvas.paste(ink, (round(left), round(scale * y - mask.height / 2)), mask)


@lru_cache(maxsize=256)
def _glyph(letter: str, cell: int, height: int) -> Image.Image:
    """A capital of Pillow's own font, bold, always of the same height; one wider than the cell is squeezed into it."""
    font = ImageFont.load_default(64)
    canvas = Image.new("L", (160, 160))
    ImageDraw.Draw(canvas).text((48, 32), letter, font=font, fill=255, stroke_width=3)
    ink = canvas.crop(canvas.getbbox())
    return ink.resize((min(cell, round(ink.width * height / ink.height)), height), Image.Resampling.LANCZOS)


def shapes_prompts(split: Literal["train", "eval"]) -> list[str]:
    """Captions of shapes for RL, all different, kinds mixed evenly along the list: 272 to train on, 96 held out."""
    numbers: dict[Kind, int] = {"single": 12, "count": 36, "two": 64, "position": 96, "mixed": 64}
    if split == "eval":
        numbers = {"single": 8, "count": 20, "two": 20, "position": 28, "mixed": 20}
    rng = np.random.default_rng([2024, split == "eval"])
    columns = []
    for kind, number in numbers.items():
        unique: dict[str, None] = {}
        while len(unique) < number:
            groups, relation = _sample_groups(rng, kind, split)
            unique[caption(Scene(kind, groups=groups, relation=relation))] = None
        columns += [((i + 0.5) / number, text) for i, text in enumerate(unique)]
    return [text for _, text in sorted(columns)]


def words_prompts(split: Literal["train", "eval"]) -> list[str]:
    """Captions of signs for RL, all different, shuffled: 288 over the training words, 96 over the held-out ones."""
    rng = np.random.default_rng([2025, split == "eval"])
    texts = [f'a {colour} sign that says "{word}"' for colour in SIGN_COLOURS for word in words(split)]
    order = rng.permutation(len(texts))
    return [texts[i] for i in order[: 96 if split == "eval" else 288]]
