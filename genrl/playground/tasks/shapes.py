"""Questions about coloured shapes on a grid of 3 x 3 cells: how many there are, and which colour most of them have.

A picture's *arrangement* is the set of cells in which
it has a shape; every fourth arrangement is held out, so held-out pictures are arranged as no training picture is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Literal

import numpy as np
from PIL import Image

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
