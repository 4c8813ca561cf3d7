"""Questions about real glyphs in 3 x 3 cells: which kind most are, how many, where one is, what lies beside one.

96 things of eight kinds, Google's Noto emoji (`rewards/scorers/objects/emoji.png`). Two things whose
numbers add up to a multiple of five are a *held-out pair*: no training picture shows both, and every held-out picture
shows one such pair. The thing asked for and the answer are never the pair, so what training never showed tells no
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
from PIL import Image

from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.emoji import EACH, NAMES, THINGS, sheet_glyphs

CELLS, CELL = 3, 24  # cells a side; pixels of a cell
PICTURE = CELLS * CELL
SMALLEST, LARGEST = 19, 24  # pixels of a glyph in a picture
BACKGROUND = (200, 256)  # levels of grey
KINDS = tuple(THINGS)
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
BESIDE = {"left of": -1, "right of": 1, "above": -CELLS, "below": CELLS}
MOST = 6  # things in a picture

Asked = tuple[dict[int, int], str, str, float]
"""Things by their cells (0 to 8, by rows), question, answer, level."""


def held_out(things: tuple[int, ...]) -> bool:
    """Whether two different things among these are a held-out pair."""
    return any((a + b) % 5 == 0 for a, b in combinations(sorted(set(things)), 2))


def _things(
    rng: np.random.Generator, split: Split, fixed: tuple[int, ...], pool: list[int], number: int
) -> tuple[int, ...]:
    """fixed, and so many others of the pool, such that all together belong to the split."""
    while True:
        numbers = (*fixed, *map(int, rng.choice(pool, number, replace=False)))
        if len(set(numbers)) == len(numbers) and held_out(numbers) == (split == "eval"):
            return numbers


def _of(kind: int) -> list[int]:
    return list(range(kind * EACH, (kind + 1) * EACH))


def _scattered(rng: np.random.Generator, things: tuple[int, ...]) -> dict[int, int]:
    return {int(cell): thing for cell, thing in zip(rng.permutation(CELLS**2), things, strict=False)}


def _two_kinds(rng: np.random.Generator, split: Split, many: int, few: int) -> tuple[tuple[int, ...], int]:
    """So many things of one kind, so few of another; and the first kind."""
    one, other = map(int, rng.permutation(len(KINDS))[:2])
    while True:
        numbers = (*rng.choice(_of(one), many, replace=False), *rng.choice(_of(other), few, replace=False))
        things = tuple(map(int, numbers))
        if held_out(things) == (split == "eval"):
            return things, one


def _category(rng: np.random.Generator, split: Split) -> Asked:
    few = int(rng.integers(1, MOST // 2))
    things, kind = _two_kinds(rng, split, int(rng.integers(few + 1, MOST - few + 1)), few)
    return _scattered(rng, things), "which kind are most things ?", KINDS[kind], 1


def _count(rng: np.random.Generator, split: Split) -> Asked:
    number = int(rng.integers(1, MOST - 1))
    things, kind = _two_kinds(rng, split, number, int(rng.integers(1, MOST - number + 1)))
    return _scattered(rng, things), f"how many {KINDS[kind]} are there ?", str(number), 2


def _place(rng: np.random.Generator, split: Split) -> Asked:
    things = _things(rng, split, (int(rng.integers(len(NAMES))),), list(range(len(NAMES))), int(rng.integers(2, MOST)))
    cells = _scattered(rng, things)
    row, column = divmod(next(cell for cell, thing in cells.items() if thing == things[0]), CELLS)
    return cells, f"where is the {NAMES[things[0]]} ?", f"{ROWS[row]} {COLUMNS[column]}", 3


def _beside(rng: np.random.Generator, split: Split) -> Asked:
    while True:
        wanted_pair, answer = map(int, rng.choice(len(NAMES), 2, replace=False))
        if not held_out((wanted_pair, answer)):
            break
    things = _things(rng, split, (wanted_pair, answer), list(range(len(NAMES))), int(rng.integers(2, MOST - 1)))
    relation = list(BESIDE)[rng.integers(len(BESIDE))]
    fits = [cell for cell in range(CELLS**2) if _neighbour(cell, relation) is not None]
    cell = int(rng.choice(fits))
    beside = _neighbour(cell, relation)
    assert beside is not None
    free = [int(free_cell) for free_cell in rng.permutation(CELLS**2) if free_cell not in (cell, beside)]
    cells = {cell: wanted_pair, beside: answer} | dict(zip(free, things[2:], strict=False))
    return cells, f"what is {relation} the {NAMES[wanted_pair]} ?", NAMES[answer], 4


def _neighbour(cell: int, relation: str) -> int | None:
    """The cell that lies so relative to another, None outside of the picture."""
    target = cell + BESIDE[relation]
    same_row = target // CELLS == cell // CELLS
    return target if 0 <= target < CELLS**2 and (same_row or abs(BESIDE[relation]) > 1) else None


ASKS: dict[str, Callable[[np.random.Generator, Split], Asked]] = {
    "category": _category,
    "count": _count,
    "place": _place,
    "combination": _beside,
}


def picture(rng: np.random.Generator, cells: dict[int, int]) -> Image.Image:
    """Things by their cells, [PICTURE, PICTURE]: each of a random size and a little off its cell's middle."""
    canvas = Image.new("RGB", (PICTURE, PICTURE), (int(rng.integers(*BACKGROUND)),) * 3)
    for cell, thing in cells.items():
        side = int(rng.integers(SMALLEST, LARGEST + 1))
        glyph = sheet_glyphs()[thing].resize((side, side), Image.Resampling.BILINEAR)
        x, y = (CELL * place + int(rng.integers(CELL - side + 1)) for place in (cell % CELLS, cell // CELLS))
        canvas.paste(glyph, (x, y), glyph)
    return canvas


def _asked(name: str, rng: np.random.Generator, split: Split) -> Question:
    cells, question, answer, level = ASKS[name](rng, split)
    return Question((picture(rng, cells), question), answer, level)


def category(rng: np.random.Generator, split: Split) -> Question:
    """Which of two kinds most things are. Level 1."""
    return _asked("category", rng, split)


def count(rng: np.random.Generator, split: Split) -> Question:
    """How many things are of a kind, 1 to 4, among others of one other kind. Level 2."""
    return _asked("count", rng, split)


def place(rng: np.random.Generator, split: Split) -> Question:
    """Ask in which of the nine cells a thing is. Level 3."""
    return _asked("place", rng, split)


def combination(rng: np.random.Generator, split: Split) -> Question:
    """Which thing lies in the next cell left of, right of, above or below another. Level 4."""
    return _asked("combination", rng, split)


def mixed(rng: np.random.Generator, split: Split) -> Question:
    """One of the four."""
    return _asked(tuple(ASKS)[rng.integers(len(ASKS))], rng, split)
