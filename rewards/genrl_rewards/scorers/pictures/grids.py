"""Grids of sub-figures: a picture is cut into its cells, and its prompt into their parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from PIL.Image import Image

CONSISTENT = """These two pictures are parts of one set, whose theme is: "{prompt}". Do they go together: one style, one
course of events, the same persons and things? Answer "Yes" or "No" first."""
"""A judge is asked this about two cells. PaCo-Reward was taught by another text, which belongs to its authors."""

_LABEL = re.compile(r"\[[A-Z0-9 -]+\](?:\s*-\s*\[[A-Z0-9 -]+\])*\s*:")


def cells(picture: Image, rows: int, columns: int) -> list[Image]:
    """The cells of a grid from left to right and top to bottom, all of the same size; a remainder is cut off."""
    width, height = picture.width // columns, picture.height // rows
    corners = [(column * width, row * height) for row in range(rows) for column in range(columns)]
    return [picture.crop((x, y, x + width, y + height)) for x, y in corners]


def parse_grid(grid: str, reward: str = "paco_grid") -> tuple[int, int]:
    """`2x3` as (2, 3): at least two cells, at most 64. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d{1,2})x(\d{1,2})", str(grid).strip())
    shape = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 2 <= shape[0] * shape[1] <= 64:
        raise ValueError(f"{reward}: grid {grid!r} should be rows x columns such as '2x2', with 2 to 64 cells")
    return shape


class GridShape:
    """The shape of each row's grid: the same for all (`2x2`), or in a column of the prompt file.

    Raises ValueError for a shape that is none, beginning with the name of the reward.
    """

    def __init__(self, grid: str, reward: str) -> None:
        self.reward, self.fixed = reward, grid if re.match(r"\d", grid) else ""
        if self.fixed:
            parse_grid(grid, reward)
        self.columns = [] if self.fixed else [grid]
        """What a reward declares to be given the shapes."""

    def __call__(self, columns: Mapping[str, Sequence[str]], count: int) -> list[tuple[int, int]]:
        """(rows, columns) of `count` rows, from the column that was declared."""
        return [parse_grid(grid, self.reward) for grid in next(iter(columns.values()), [self.fixed] * count)]


def theme_of(prompt: str) -> str:
    """What a prompt says of all cells together: the text before the first label, the whole prompt where there is
    none."""
    return _LABEL.split(prompt)[0].strip() or prompt


def parts_of(prompt: str) -> list[str]:
    """What a prompt asks of each cell: the texts after labels such as `[TOP-LEFT]:` or `[TOP]-[LEFT]:`, in order."""
    return [part.strip() for part in _LABEL.split(prompt)[1:]]
