"""Pairs of sub-figures of grids, as PaCo-Reward is taught by (arXiv 2512.04784): of one grid, or of two.

    python -m genrl.playground.tasks.grid_pairs grids.jsonl --out data/pairs --pairs 20000 --held-out 0.1

A line of grids.jsonl is a picture whose cells belong together: `image` (beside the file), `grid` (`2x2`), `prompt`, and
`set` if some grids are close to each other, such as those of one theme. What is written is `train.jsonl` and
`eval.jsonl` of questions with two pictures, for `trainer.algorithm: sft`: `prompt`, `image`, `answer` (Yes or No), and
`first` and `second`, the prompts of the grids. No grid is in both. Where people have judged the pairs, use their words
instead; a grid whose cells do not belong together teaches the wrong answer.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from genrl_rewards.scorers.pictures.grids import CONSISTENT, cells, parse_grid, theme_of

TOGETHER, NEAR = 0.5, 0.5
"""Shares: of pairs of one grid, and of the others those of one set."""


class Pair(NamedTuple):
    """(grid, cell) of both pictures; they belong together if the grid is the same."""

    first: tuple[int, int]
    second: tuple[int, int]

    @property
    def together(self) -> bool:
        return self.first[0] == self.second[0]


def drawn_pair(rng: np.random.Generator, sets: Sequence[object], cells: Sequence[int]) -> Pair:
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
                pair = drawn_pair(rng, sets, numbers)
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
    for place in rng.permutation(len(members)):
        sides[len(sides[1]) < held_out * len(sets)].extend(list(members.values())[place])
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


if __name__ == "__main__":
    main()
