"""Preference sets: prompts with two images each, one preferred to the other.

A source of prompts (`genrl.data.prompts`) with the columns `image_win` and `image_lose`: a .jsonl file whose columns
are
paths relative to it, or a data set `id:split` with images in these columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image, ImageOps
from torch import Tensor

from genrl.data.picture_cells import check_picture, opened, unreadable
from genrl.data.prompts import PREFERENCE_COLUMNS, Prompt, PromptError, missing_images, no_image_column

Reader = Callable[[Prompt], tuple[Image.Image, Image.Image]]
"""The preferred image of a row, and the other one."""

T = TypeVar("T")


def open_set(source: str, rows: Sequence[Prompt]) -> Reader:
    """What reads the images of these rows of `source`. Raises PromptError where a column is missing."""
    cells = _cells(source, rows)

    def read(row: Prompt) -> tuple[Image.Image, Image.Image]:
        preferred, other = _of_both(_loaded, row, source, cells(row))
        return preferred, other

    return read


def check_set(source: str, rows: Sequence[Prompt]) -> None:
    """Raise PromptError, naming its row, where a column is missing or an image cannot be read (`check_picture`)."""
    cells = _cells(source, rows)
    for row in rows:
        _of_both(check_picture, row, source, cells(row))


def as_tensor(image: Image.Image, height: int, width: int) -> Tensor:
    """float32 [3, height, width] in [0, 1]: scaled to cover that size, cut around the centre."""
    fitted = ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.BICUBIC)
    flat = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return flat.view(height, width, 3).permute(2, 0, 1).float() / 255


def _cells(source: str, rows: Sequence[Prompt]) -> Callable[[Prompt], Any]:
    """The cells of a row, by column."""
    if Path(source).suffix in (".txt", ".jsonl"):
        wrong = missing_images(source, rows)
        if wrong is not None:
            raise PromptError(wrong)
        return lambda row: row.columns
    import datasets

    name, _, split = source.partition(":")
    table = datasets.load_dataset(name, split=split)
    for column in PREFERENCE_COLUMNS:
        if column not in table.column_names:
            raise PromptError(f"{source}: {no_image_column(column, table.column_names)}")
        table = table.cast_column(column, datasets.Image(decode=False))
    return lambda row: table[row.line - 1]


def _of_both(use: Callable[[Any], T], row: Prompt, source: str, cells: Any) -> list[T]:
    """What `use` makes of the preferred image of a row, and of the other one."""
    found = []
    for column in PREFERENCE_COLUMNS:
        try:
            found.append(use(cells[column]))
        except unreadable() as error:
            raise PromptError(f"{source}:{row.line}: {column} cannot be read as an image: {error}") from error
    return found


def _loaded(cell: Any) -> Image.Image:
    with opened(cell) as image:
        image.load()
        return image
