"""Pictures as rows of prompt files and data sets hold them: opened, and checked before training without decoding."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from rewards.contract import check_header

UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What Pillow raises for a file that is no picture, or a broken one."""


def opened(cell: Any) -> Image.Image:
    """What a cell holds, a path or what `datasets.Image(decode=False)` gives (bytes or a path), not decoded yet."""
    if isinstance(cell, dict) and cell.get("bytes") is not None:
        return Image.open(io.BytesIO(cell["bytes"]))
    file = cell["path"] if isinstance(cell, dict) else cell
    if file is None:
        raise ValueError("there is none")
    return Image.open(file)


def check_picture(cell: Any) -> None:
    """Raise one of `UNREADABLE` where a cell holds no sound picture, as far as that is known without decoding it: a
    header, and of a PNG all checksums."""
    with opened(cell) as image:
        check_header(image)
        image.verify()
