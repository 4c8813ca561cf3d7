"""Prompts with images to train on: two, one preferred to the other (a preference set), or one, the target.

A source of prompts (`genrl.data.prompts`) with the columns `image_win` and `image_lose`, or `target_image`: a .jsonl
file, where these are paths relative to it, or a data set `id:split` with images in these columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from genrl.data.prompts import FILES, Prompt, PromptError, open_picture_table
from genrl.data.rows import PREFERENCE_COLUMNS, no_column
from genrl_rewards.pictures import check_picture, open_picture, picture_size

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

TARGET_COLUMNS = ("target_image",)
"""Of a set of targets. It holds paths, as it ends in `image`."""

Size = tuple[int | None, int | None]
"""Height and width, None where it is the pipeline's own."""
UNLIKE = 1.02
"""Ratio of two pictures' width over height above which they are cut differently: a column of pixels in fifty."""
Reader = Callable[[Prompt], "tuple[Image, ...]"]
"""The images of a row: the preferred one and the other, or the target."""

T = TypeVar("T")


def open_set(source: str, rows: Sequence[Prompt], columns: Sequence[str] = PREFERENCE_COLUMNS) -> Reader:
    """What reads the images of these rows of `source`. Raises PromptError where a column is missing."""
    cells = _cells(source, rows, columns)
    return lambda row: tuple(_of_each(open_picture, row, source, cells(row), columns))


def check_set(
    source: str,
    rows: Sequence[Prompt],
    columns: Sequence[str] = PREFERENCE_COLUMNS,
    *,
    beside: str | None = None,
    size: Size = (None, None),
) -> None:
    """Raise PromptError, naming its row, where a column is missing, or an image cannot be read (`check_picture`) or is
    unlike in shape to the picture that the pipeline is given `beside` it, or to the size that is sampled: images are
    cut to that size (`as_tensor`), the picture beside them is not.

    beside: column of the rows; size: height and width, None where the pipeline's own is taken, which is not known here.
    """
    cells = _cells(source, rows, columns)
    for row in rows:
        shapes = dict(zip(columns, _of_each(check_picture, row, source, cells(row), columns), strict=True))
        if beside is not None:
            shapes[beside] = _of_each(picture_size, row, source, row.columns, [beside])[0]
            if size[0] is not None and size[1] is not None:
                shapes["the size that is sampled"] = (size[1], size[0])
            _check_alike(shapes, f"{source}:{row.line}", beside)


def _check_alike(shapes: Mapping[str, tuple[int, int]], where: str, beside: str) -> None:
    ratios = [width / height for width, height in shapes.values()]
    # Not equal: sizes are rounded to multiples of the model's patches, so that two of one shape differ by some pixels.
    if max(ratios) > UNLIKE * min(ratios):
        sizes = ", ".join(f"{name} {width} x {height}" for name, (width, height) in shapes.items())
        why = f"images are cut to the size that is sampled, {beside} is not, so they would not fit"
        raise PromptError(f"{where}: unlike shapes ({sizes}): {why}; cut them to one shape first")


def missing_images(source: str, rows: Sequence[Prompt], columns: Sequence[str] = PREFERENCE_COLUMNS) -> str | None:
    """What is wrong with the first row of a .jsonl file that lacks one of its images; None where all have them."""
    for row in rows:
        for column in columns:
            if row.columns.get(column) is None:
                needed = f"(needed: {' and '.join(columns)})"
                return f"{source}:{row.line}: {no_column(column, row.columns)} {needed}"
    return None


def set_problem(source: str, rows: Sequence[Prompt] | None, columns: Sequence[str] = PREFERENCE_COLUMNS) -> str | None:
    """What is wrong with a file of prompts with images, before any is opened; rows: None where it could not be read."""
    if Path(source).suffix == ".txt":
        return f"{source} has prompts only; a set with {' and '.join(columns)} is .jsonl or a data set id:split"
    return None if rows is None else missing_images(source, rows, columns)


def as_tensor(image: Image, height: int, width: int) -> Tensor:
    """float32 [3, height, width] in [0, 1]: scaled to cover that size, cut around the centre."""
    import torch
    from PIL.Image import Resampling
    from PIL.ImageOps import fit

    fitted = fit(open_picture(image), (width, height), Resampling.BICUBIC)
    flat = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return flat.view(height, width, 3).permute(2, 0, 1).float() / 255


def _cells(source: str, rows: Sequence[Prompt], columns: Sequence[str]) -> Callable[[Prompt], Mapping[str, Any]]:
    """What gives the cells of a row by column."""
    if Path(source).suffix in FILES:
        if problem := missing_images(source, rows, columns):
            raise PromptError(problem)
        return lambda row: row.columns
    table = open_picture_table(source, *columns)
    return lambda row: table[row.line - 1]


def _of_each(
    use: Callable[[Any], T], row: Prompt, source: str, cells: Mapping[str, Any], columns: Sequence[str]
) -> list[T]:
    """What `use` makes of each image of a row."""
    datasets = []
    for column in columns:
        try:
            datasets.append(use(cells[column]))
        except ValueError as error:
            raise PromptError(f"{source}:{row.line}: {column} cannot be read as an image: {error}") from error
    return datasets
