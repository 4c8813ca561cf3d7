"""Preference sets: prompts with two images each, one preferred to the other.

A source of prompts (`genrl.prompts`) with the columns `image_win` and `image_lose`: a .jsonl file whose columns are
paths relative to it, or a data set `id:split` with images in these columns.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from genrl.prompts import PREFERENCE_COLUMNS, Prompt, PromptError, missing_images, no_image_column

Reader = Callable[[Prompt], tuple[Image.Image, Image.Image]]
"""The preferred image of a row, and the other one."""


def open_set(source: str, rows: Sequence[Prompt]) -> Reader:
    """What reads the images of these rows of `source`. Raises PromptError where a column is missing."""
    if Path(source).suffix in (".txt", ".jsonl"):
        wrong = missing_images(source, rows)
        if wrong is not None:
            raise PromptError(wrong)
        return lambda row: _both(row, source, row.columns)
    import datasets

    name, _, split = source.partition(":")
    table = datasets.load_dataset(name, split=split)
    for column in PREFERENCE_COLUMNS:
        if column not in table.column_names:
            raise PromptError(f"{source}: {no_image_column(column, table.column_names)}")
        table = table.cast_column(column, datasets.Image(decode=False))
    return lambda row: _both(row, source, table[row.line - 1])


def as_tensor(image: Image.Image, height: int, width: int) -> Tensor:
    """float32 [3, height, width] in [0, 1]: scaled to cover that size, cut around the centre."""
    fitted = ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.BICUBIC)
    flat = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return flat.view(height, width, 3).permute(2, 0, 1).float() / 255


def _both(row: Prompt, source: str, cells: Any) -> tuple[Image.Image, Image.Image]:
    images = []
    for column in PREFERENCE_COLUMNS:
        try:
            images.append(_image(cells[column]))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise PromptError(f"{source}:{row.line}: {column} cannot be read as an image: {error}") from error
    return images[0], images[1]


def _image(cell: Any) -> Image.Image:
    """A path, or what `datasets.Image(decode=False)` gives: bytes or a path."""
    if isinstance(cell, dict) and cell.get("bytes") is not None:
        file: Any = io.BytesIO(cell["bytes"])
    else:
        file = cell["path"] if isinstance(cell, dict) else cell
    if file is None:
        raise ValueError("there is none")
    with Image.open(file) as image:
        image.load()
        return image
