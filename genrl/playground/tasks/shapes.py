"""Questions about coloured shapes.

On a grid of 3 x 3 cells: how many there are, and which colour most of them have. A picture's *arrangement* is the set
of cells in which it has a shape; every fourth arrangement is held out, so held-out pictures are arranged as no training
picture is.

Clips of four frames: in which of them a colour is seen (K-frames), and what is seen in one frame. Held out are every
fourth sequence of the frames' colours, and every fourth of the places at which a lone frame shows its shape: never what
an answer could be told from.

How good a picture is, from 5.0 (as rendered) to 1.0 (Q-Hawkeye), and which of two is better (R1-Reward). Pictures are
arranged as on the grid, and degraded by noise, blur, JPEG or darkness in nine strengths.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Literal

import numpy as np
from PIL import Image, ImageFilter

from genrl.playground.shapes import SIZE, Scene, Thing, draw
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES

Task = Literal["count", "colour", "shapes"]

PICTURE = 48  # pixels
CELLS = 3  # a side
MOST = 6  # shapes in a picture


def held_out(cells: tuple[int, ...]) -> bool:
    """Whether pictures with shapes in these cells (0 to 8, by rows) are for evaluation only: every fourth set."""
    return (sum(cells) + len(cells)) % 4 == 0


def arrangements(split: Split, count: int) -> list[tuple[int, ...]]:
    """All sets of so many cells that belong to the split."""
    return [cells for cells in combinations(range(CELLS**2), count) if held_out(cells) == (split == "eval")]


def scene(rng: np.random.Generator, split: Split, kinds: list[tuple[str, str]]) -> Scene:
    """Shapes of these (colour, shape) in the cells of a random arrangement, each a little off its cell's middle."""
    chosen = arrangements(split, len(kinds))
    cells = chosen[rng.integers(len(chosen))]
    step = SIZE / CELLS
    things = []
    for (colour, shape), cell in zip(kinds, cells, strict=True):
        x, y = (step * (place + 0.5) + rng.uniform(-1, 1) for place in (cell % CELLS, cell // CELLS))
        things.append(Thing(colour, shape, float(x), float(y), float(rng.uniform(7, 8.5))))
    return Scene("mixed", tuple(things))


def _colour(rng: np.random.Generator) -> str:
    return COLOURS[rng.integers(len(COLOURS))]


def _count(rng: np.random.Generator, split: Split) -> tuple[Scene, str, str]:
    kinds = [(_colour(rng), SHAPES[rng.integers(len(SHAPES))]) for _ in range(int(rng.integers(1, MOST + 1)))]
    return scene(rng, split, kinds), "how many shapes are there ?", str(len(kinds))


def _most(rng: np.random.Generator, split: Split) -> tuple[Scene, str, str]:
    """Two to four shapes of one colour, and fewer of another."""
    colour, other = (COLOURS[k] for k in rng.permutation(len(COLOURS))[:2])
    many = int(rng.integers(2, 5))
    colours = [colour] * many + [other] * int(rng.integers(1, many))
    kinds = [(colours[k], SHAPES[rng.integers(len(SHAPES))]) for k in rng.permutation(len(colours))]
    return scene(rng, split, kinds), "which colour have most shapes ?", colour


def _either(rng: np.random.Generator, split: Split) -> tuple[Scene, str, str]:
    return (_count if rng.random() < 0.5 else _most)(rng, split)


QUESTIONS: dict[str, Callable[[np.random.Generator, Split], tuple[Scene, str, str]]] = {
    "count": _count,
    "colour": _most,
    "shapes": _either,
}
"""By name of the task; "shapes" asks both kinds of question, mixed evenly."""


def _asked(task: Task, rng: np.random.Generator, split: Split) -> Question:
    """A picture of `PICTURE` pixels with its question. The more shapes, the higher the level."""
    picture, question, answer = QUESTIONS[task](rng, split)
    return Question((Image.fromarray(draw(picture, PICTURE)), question), answer, len(picture.things))


def count(rng: np.random.Generator, split: Split) -> Question:
    """How many shapes there are."""
    return _asked("count", rng, split)


def colour(rng: np.random.Generator, split: Split) -> Question:
    """Which colour most of them have."""
    return _asked("colour", rng, split)


def either(rng: np.random.Generator, split: Split) -> Question:
    """One of the two questions."""
    return _asked("shapes", rng, split)


FRAMES = 4
KEYS = (*combinations(range(FRAMES), 1), *combinations(range(FRAMES), 2))
"""The sets of frames that can show the colour, from 0."""


def held_out_clip(colours: Sequence[str]) -> bool:
    """Whether clips whose frames have these colours, one after the other, are for evaluation only."""
    return sum(map(COLOURS.index, colours)) % 4 == 0


def _frame(rng: np.random.Generator, colour: str, shape: str) -> tuple[Image.Image, Thing]:
    x, y = rng.uniform(0.35, 0.65, 2) * SIZE
    thing = Thing(colour, shape, float(x), float(y), float(rng.uniform(14, 19)))
    return Image.fromarray(draw(Scene("single", (thing,)), PICTURE)), thing


def _of_colour(colour: str) -> str:
    return f"which shape is {colour} ?"


def keys(rng: np.random.Generator, split: Split) -> Question:
    """A clip, one shape in each frame. The answer is the numbers of the frames with the colour, from 1.

    Columns for an answerer who is shown the chosen frames only: `frames` (pictures), `about` (the question that it is
    asked) and `truth` (its right answer). The frames without the colour show other shapes.
    """
    shown, colour = KEYS[rng.integers(len(KEYS))], COLOURS[rng.integers(len(COLOURS))]
    shape = SHAPES[rng.integers(len(SHAPES))]
    other_colours, other_shapes = ([x for x in xs if x not in (colour, shape)] for xs in (COLOURS, SHAPES))
    while True:
        colours = [colour if k in shown else other_colours[rng.integers(len(other_colours))] for k in range(FRAMES)]
        if held_out_clip(colours) == (split == "eval"):
            break
    frames = [
        _frame(rng, seen, shape if k in shown else other_shapes[rng.integers(len(other_shapes))])[0]
        for k, seen in enumerate(colours)
    ]
    columns = {"frames": frames, "about": _of_colour(colour), "truth": shape}
    answer = " ".join(str(k + 1) for k in shown)
    return Question((*frames, f"in which frames is a {colour} shape ?"), answer, len(shown), columns)


def what(rng: np.random.Generator, split: Split) -> Question:
    """One frame, and which shape has its colour."""
    colour, shape = COLOURS[rng.integers(len(COLOURS))], SHAPES[rng.integers(len(SHAPES))]
    while True:
        frame, thing = _frame(rng, colour, shape)
        if ((int(thing.x) + int(thing.y)) % 4 == 0) == (split == "eval"):
            return Question((frame, _of_colour(colour)), shape, 1)


STRENGTHS = 8  # steps from unharmed to worst
KINDS = ("noise", "blur", "jpeg", "dark")


def degraded(picture: Image.Image, kind: str, strength: float, rng: np.random.Generator) -> Image.Image:
    """RGB of the same size. strength: 0 (unharmed) to 1. Raises ValueError for an unknown kind."""
    if not strength:
        return picture
    if kind == "noise":
        noisy = np.array(picture, dtype=np.float64) + rng.normal(0, 110 * strength, size=(*picture.size[::-1], 3))
        return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    if kind == "blur":
        return picture.filter(ImageFilter.GaussianBlur(strength * max(picture.size) / 12))
    if kind == "jpeg":
        stream = io.BytesIO()
        small = picture.resize([max(4, round(side * (1 - 0.75 * strength))) for side in picture.size])
        small.save(stream, "JPEG", quality=round(40 - 36 * strength))
        return Image.open(stream).convert("RGB").resize(picture.size, Image.Resampling.NEAREST)
    if kind == "dark":
        return picture.point([round(value * (1 - 0.85 * strength)) for value in range(256)] * 3)
    raise ValueError(f"no degradation {kind!r}: {', '.join(KINDS)}")


def _scene(rng: np.random.Generator, split: Split) -> Image.Image:
    kinds = [
        (COLOURS[rng.integers(len(COLOURS))], SHAPES[rng.integers(len(SHAPES))])
        for _ in range(int(rng.integers(3, MOST + 1)))
    ]
    return Image.fromarray(draw(scene(rng, split, kinds), PICTURE))


def rated(rng: np.random.Generator, split: Split) -> Question:
    """A picture and its score, 5 - 4 strength, in steps of a half."""
    picture, step = _scene(rng, split), int(rng.integers(STRENGTHS + 1))
    kind = KINDS[rng.integers(len(KINDS))]
    picture_shown = degraded(picture, kind, step / STRENGTHS, rng)
    # strong degradations are plain to see, weak ones are not
    columns = {"harm": kind if step else "none"}
    return Question(
        (picture_shown, "how good is this picture , from 1 to 5 ?"), f"{5 - step / 2:.1f}", STRENGTHS - step, columns
    )


def better(rng: np.random.Generator, split: Split) -> Question:
    """One scene degraded twice in the same way, three strengths or more apart; the answer is the better one, A or B."""
    picture, kind = _scene(rng, split), KINDS[rng.integers(len(KINDS))]
    apart = int(rng.integers(3, STRENGTHS + 1))
    least = int(rng.integers(STRENGTHS + 1 - apart))
    pictures = [degraded(picture, kind, step / STRENGTHS, rng) for step in (least, least + apart)]
    answer = "AB"[rng.integers(2)]
    pair = pictures if answer == "A" else pictures[::-1]
    return Question((*pair, "which picture is better , A or B ?"), answer, STRENGTHS - apart)
