"""Pictures as rows of prompt files and data sets hold them: opened, and checked before training without decoding."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from genrl.data.prompts import PromptError, open_data_set
from genrl.data.rows import no_column
from genrl_rewards.contract import check_header

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

# Pillow is imported where a picture is opened: configurations are checked without it.


def unreadable() -> tuple[type[Exception], ...]:
    """What Pillow raises for a file that is no picture, or a broken one."""
    from PIL.Image import DecompressionBombError

    return OSError, ValueError, SyntaxError, DecompressionBombError


def opened(cell: Any) -> Image:
    """The picture of a cell, not decoded yet. cell: a path, or what `datasets.Image(decode=False)` gives."""
    from PIL.Image import open as open_image

    if isinstance(cell, dict) and cell.get("bytes") is not None:
        return open_image(io.BytesIO(cell["bytes"]))
    file = cell["path"] if isinstance(cell, dict) else cell
    if file is None:
        raise ValueError("there is none")
    return open_image(file)


def check_picture(cell: Any) -> tuple[int, int]:
    """The width and height that a picture's header says. Raises one of `unreadable()` where a cell holds no sound
    picture, as far as that is known without decoding it: a header, and of a PNG all checksums."""
    with opened(cell) as image:
        check_header(image)
        size: tuple[int, int] = image.size
        image.verify()
    return size


def open_picture_table(source: str, *columns: str) -> Dataset:
    """The data set `id:split`, with undecoded pictures in these columns. Raises PromptError where one is missing."""
    table = open_data_set(source)
    from datasets import Image

    for column in columns:
        if column not in table.column_names:
            raise PromptError(f"{source}: {no_column(column, table.column_names)}")
        table = table.cast_column(column, Image(decode=False))
    return table
