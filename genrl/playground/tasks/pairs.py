"""Do two cells of grids belong together? Pairs of sub-figures, as PaCo-Reward is taught by (arXiv 2512.04784).

A grid of the embedded world shows the same things in each of its four cells, placed anew. Grids come in sets of two
that differ in one word. Held out are the world's combinations: every held-out grid has one, no other has any. Cells are
drawn when they are first asked for: a few hundred grids give any number of pairs.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image

from genrl.mdp.noise import derive_seed
from genrl.playground.shapes import Scene, caption, draw, held_out, place
from genrl.playground.tasks import scenes
from genrl.playground.tasks.grid_pairs import drawn_pair
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES, Group

QUESTION = "same in both ?"
GRIDS = {"train": 600, "eval": 100}
CELLS = 4  # of a grid
PAIRS = 50_000


class Consistent:
    """The questions of a split: [number]. The answer is yes or no; `first` and `second` say what is shown."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return PAIRS

    def __getitem__(self, number: int) -> Question:
        grids = GRIDS[self.split]
        sets = [grid // 2 for grid in range(grids)]
        pair = drawn_pair(_rng(self.split, "pair", number), sets, [CELLS] * grids)
        pictures = [Image.fromarray(cell(self.split, *scene_args)) for scene_args in pair]
        first, second = (caption(Scene("mixed", groups=shown(self.split, grid))) for grid, _ in pair)
        columns = {"first": first, "second": second}
        return Question((*pictures, QUESTION), "yes" if pair.together else "no", 1, columns)


def _rng(*key: int | str) -> np.random.Generator:
    return np.random.default_rng(derive_seed("grids", *key))


@cache
def shown(split: Split, grid: int) -> tuple[Group, ...]:
    """What a grid shows, in an order of its own, so that it is said in one way."""
    rng = _rng(split, grid)
    if grid % 2:
        other = shown(split, grid - 1)
        groups = other
        while set(groups) == set(other) or any(map(held_out, groups)) != (split == "eval"):
            groups = near(rng, other)
    else:
        groups = scenes.scene(rng, split).groups
    return tuple(sorted(groups, key=lambda group: (group.colour, group.shape)))


@cache
def cell(split: Split, grid: int, number: int) -> np.ndarray:
    """uint8 [64, 64, 3]."""
    groups = shown(split, grid)
    return draw(Scene("mixed", place(_rng(split, grid, number), groups, None), groups))


def near(rng: np.random.Generator, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Change the number, the colour or the shape of one group; as they are where two would become alike, or there would
    be more than four things."""
    changed = int(rng.integers(len(groups)))
    count, colour, shape = groups[changed].count, groups[changed].colour, groups[changed].shape
    kind = rng.integers(3)
    if kind == 0:
        count = max(1, count + (1 if rng.random() < 0.5 else -1))
    elif kind == 1:
        colour = COLOURS[rng.integers(len(COLOURS))]
    else:
        shape = SHAPES[rng.integers(len(SHAPES))]
    changed_groups = (*groups[:changed], Group(count, colour, shape), *groups[changed + 1 :])
    alike = len({(group.colour, group.shape) for group in changed_groups}) < len(changed_groups)
    return groups if alike or sum(group.count for group in changed_groups) > 4 else changed_groups
