"""Scenes of the embedded world, which its tiny generators draw too: how many shapes there are (Syn-GRPO), and whether
two cells of grids of them belong together: pairs of sub-figures, as PaCo-Reward is taught by (arXiv 2512.04784).

A grid of the embedded world shows the same things in each of its four cells, placed anew. Grids come in sets of two
that differ in one word. Held out are the world's combinations: every held-out grid has one, no other has any. Cells are
drawn when they are first asked for: a few hundred grids give any number of pairs.

Pairs of grids of your own are written by

    python -m genrl.playground.tasks.pairs grids.jsonl --out data/pairs --pairs 20000 --held-out 0.1

A line of grids.jsonl is a picture whose cells belong together: `image` (beside the file), `grid` (`2x2`), `prompt`, and
`set` if some grids are close to each other, such as those of one theme. What is written is `train.jsonl` and
`eval.jsonl` of questions with two pictures, for `trainer.algorithm: sft`: `prompt`, `image`, `answer` (Yes or No), and
`first` and `second`, the prompts of the grids. No grid is in both. Where people have judged the pairs, use their words
instead; a grid whose cells do not belong together teaches the wrong answer.

Scenes of the embedded world, which its tiny generators draw too: how many shapes there are (Syn-GRPO).

Held out are the world's own combinations of number, colour and shape.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from genrl.mdp.noise import derive_seed
from genrl.playground.shapes import Kind, Scene, caption, draw, held_out, place, sample_scene
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES, Group
from genrl_rewards.scorers.pictures.grids import CONSISTENT, cells, parse_grid, theme_of

KINDS: tuple[Kind, ...] = ("single", "count", "two", "mixed")


def scene(rng: np.random.Generator, split: Split) -> Scene:
    """One to four shapes, in one or two groups."""
    return sample_scene(rng, KINDS[rng.integers(len(KINDS))], split)


def number(rng: np.random.Generator, split: Split) -> Question:
    """The answer is the number of shapes; the column `caption` says what is shown."""
    counted = scene(rng, split)
    things = len(counted.things)
    picture = Image.fromarray(draw(counted))
    return Question((picture, "how many shapes are there ?"), str(things), things, {"caption": caption(counted)})


TOGETHER, NEAR = 0.5, 0.5
"""Shares: of pairs of one grid, and of the others those of one set."""


class Pair(NamedTuple):
    """(grid, cell) of both pictures; they belong together if the grid is the same."""

    first: tuple[int, int]
    second: tuple[int, int]

    @property
    def together(self) -> bool:
        return self.first[0] == self.second[0]


def random_pair(rng: np.random.Generator, sets: Sequence[object], cells: Sequence[int]) -> Pair:
    """One pair. sets: of each grid; cells: how many each grid has, at least two. Needs two grids."""
    number = int(rng.integers(len(sets)))
    if rng.random() < TOGETHER:
        first, second = rng.choice(cells[number], size=2, replace=False)
        return Pair((number, int(first)), (number, int(second)))
    others = [grid for grid in range(len(sets)) if grid != number]
    close = [grid for grid in others if sets[grid] == sets[number]] if rng.random() < NEAR else []
    chosen = close or others
    other = int(chosen[rng.integers(len(chosen))])
    return Pair((number, int(rng.integers(cells[number]))), (other, int(rng.integers(cells[other]))))


def write_pairs(
    grids: Path, out: Path, number: int, held_out: float, question: str = CONSISTENT, seed: int = 0
) -> None:
    """The cells as PNG and the rows of both files; so many pairs, a share of them held out by whole sets.

    Raises ValueError for a grid of less than two cells, and for fewer than two grids on either side.
    """
    rows = [json.loads(line) for line in grids.read_text(encoding="utf-8").splitlines() if line.strip()]
    shapes = [parse_grid(row["grid"]) for row in rows]
    (out / "cells").mkdir(parents=True, exist_ok=True)
    for k, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
        with Image.open(grids.parent / row["image"]) as picture:
            for c, cell in enumerate(cells(picture.convert("RGB"), *shape)):
                cell.save(out / "cells" / f"{k}-{c}.png")
    rng = np.random.default_rng(seed)
    sides = split(rng, [row.get("set", k) for k, row in enumerate(rows)], held_out)
    for name, side, count in zip(("train", "eval"), sides, (1 - held_out, held_out), strict=True):
        if len(side) < 2:
            raise ValueError(
                f"{grids}: {len(side)} grids for {name}.jsonl; pairs need two (grids of a set stay together)"
            )
        sets, numbers = [rows[k].get("set", k) for k in side], [shapes[k][0] * shapes[k][1] for k in side]
        with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(round(number * count)):
                pair = random_pair(rng, sets, numbers)
                (a, i), (b, j) = ((side[grid], cell) for grid, cell in pair)
                first, second = rows[a]["prompt"], rows[b]["prompt"]
                row = {
                    "prompt": question.replace("{prompt}", theme_of(first)),
                    "image": [f"cells/{a}-{i}.png", f"cells/{b}-{j}.png"],
                    "answer": "Yes" if pair.together else "No",
                    "first": first,
                    "second": second,
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def split(rng: np.random.Generator, sets: Sequence[object], held_out: float) -> tuple[list[int], list[int]]:
    """Grids to train on and held-out ones: whole sets, in random order, until their share is reached."""
    members: dict[object, list[int]] = defaultdict(list)
    for grid, group in enumerate(sets):
        members[group].append(grid)
    sides: tuple[list[int], list[int]] = ([], [])
    for k in rng.permutation(len(members)):
        sides[len(sides[1]) < held_out * len(sets)].extend(list(members.values())[k])
    return sides


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("grids", type=Path)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--pairs", type=int, default=20_000)
    arguments.add_argument("--held-out", type=float, default=0.1)
    arguments.add_argument("--question", default=CONSISTENT)
    options = arguments.parse_args()
    write_pairs(options.grids, options.out, options.pairs, options.held_out, options.question)


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
        pair = random_pair(_rng(self.split, "pair", number), sets, [CELLS] * grids)
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
        groups = scene(rng, split).groups
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


if __name__ == "__main__":
    main()
