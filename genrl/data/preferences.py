"""Preference sets: prompts with two images each, one preferred to the other.

A source of prompts (`genrl.data.prompts`) with the columns `image_win` and `image_lose`: a .jsonl file, where these are
paths relative to it, or a data set `id:split` with images in these columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from genrl.data.picture_cells import check_picture, open_picture_table, opened, unreadable
from genrl.data.prompts import FILES, Prompt, PromptError
from genrl.data.rows import PREFERENCE_COLUMNS, no_column

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Reader = Callable[[Prompt], "tuple[Image, Image]"]
"""The preferred image of a row, and the other one."""

T = TypeVar("T")


def open_set(source: str, rows: Sequence[Prompt]) -> Reader:
    """What reads the images of these rows of `source`. Raises PromptError where a column is missing."""
    cells = _cells(source, rows)
    return lambda row: _of_both(_decoded, row, source, cells(row))


def check_set(source: str, rows: Sequence[Prompt]) -> None:
    """Raise PromptError, naming its row, where a column is missing or an image cannot be read (`check_picture`)."""
    cells = _cells(source, rows)
    for row in rows:
        _of_both(check_picture, row, source, cells(row))


def missing_images(source: str, rows: Sequence[Prompt]) -> str | None:
    """What is wrong with the first row of a .jsonl file that lacks an image of its pair; None where all have both."""
    for row in rows:
        for column in PREFERENCE_COLUMNS:
            if row.columns.get(column) is None:
                wanted = f"(a preference set has the columns {' and '.join(PREFERENCE_COLUMNS)})"
                return f"{source}:{row.line}: {no_column(column, row.columns)} {wanted}"
    return None


def as_tensor(image: Image, height: int, width: int) -> Tensor:
    """float32 [3, height, width] in [0, 1]: scaled to cover that size, cut around the centre."""
    import torch
    from PIL.Image import Resampling
    from PIL.ImageOps import fit

    fitted = fit(image.convert("RGB"), (width, height), Resampling.BICUBIC)
    flat = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return flat.view(height, width, 3).permute(2, 0, 1).float() / 255


def _cells(source: str, rows: Sequence[Prompt]) -> Callable[[Prompt], Mapping[str, Any]]:
    """What gives the cells of a row by column."""
    if Path(source).suffix in FILES:
        if problem := missing_images(source, rows):
            raise PromptError(problem)
        return lambda row: row.columns
    table = open_picture_table(source, *PREFERENCE_COLUMNS)
    return lambda row: table[row.line - 1]


def _of_both(use: Callable[[Any], T], row: Prompt, source: str, cells: Mapping[str, Any]) -> tuple[T, T]:
    """What `use` makes of the preferred image of a row, and of the other one."""

    def of(column: str) -> T:
        try:
            return use(cells[column])
        except unreadable() as error:
            raise PromptError(f"{source}:{row.line}: {column} cannot be read as an image: {error}") from error

    preferred, other = PREFERENCE_COLUMNS
    return of(preferred), of(other)


def _decoded(cell: Any) -> Image:
    with opened(cell) as image:
        image.load()
        return image
