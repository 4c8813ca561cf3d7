"""How large the sample of each prompt is: what its row says, or the buckets of `sampling.buckets`. No torch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from genrl.data.prompts import Prompt, PromptError, is_data_set
from genrl_rewards.pictures import picture_size

logger = logging.getLogger(__name__)

NAMES = ("height", "width", "num_frames")
"""Arguments of a pipeline's call, and columns of the rows."""
ARGUMENTS = (
    "negative_prompt negative_prompt_2 negative_prompt_3 prompt_2 prompt_3 guidance_scale true_cfg_scale "
    "num_inference_steps strength seed"
).split()
"""Further arguments that people have as columns; all samples have one value of theirs."""
Buckets = Literal["rows"] | Sequence[Sequence[int]]


def sized(rows: Sequence[Prompt], buckets: Buckets, picture: str | None, source: str) -> list[Prompt]:
    """The rows with their size. `rows`: columns height, width and num_frames say it, and where one is absent or null
    the pipeline's default does. A list of (height, width[, frames]): rows are dealt to it in turn, or where `picture`
    names a column of pictures, each gets the bucket whose shape is most like its picture's (the first of two).

    Raises PromptError for a row whose size is no whole number above 0, and for rows of which none says its size.
    """
    if rows and is_data_set(source):  # of a file `check_files` has said it
        for text in unread(rows[0].columns):
            logger.warning("%s: %s", source, text)
    if buckets == "rows":
        sized_rows = [replace(row, size=_written(row, source)) for row in rows]
        if rows and not any(row.size for row in sized_rows):
            text = f"no row has a column {', '.join(NAMES)}; add them, or list the sizes in sampling.buckets"
            raise PromptError(f"{source}: {text}")
        return sized_rows
    sizes = [dict(zip(NAMES, bucket, strict=False)) for bucket in buckets]
    if not sizes:
        return list(rows)
    if picture is None:
        return [replace(row, size=sizes[k % len(sizes)]) for k, row in enumerate(rows)]
    return [replace(row, size=_nearest(row, sizes, picture, source)) for row in rows]


def unread(columns: Iterable[str]) -> list[str]:
    """What is said of columns that are named like an argument of the pipeline's call: rows do not change these."""
    for_all = "is not read: all samples have the same, which is written in sampling or sampling.pipeline_args"
    return [f"the column {name} {for_all}" for name in columns if name in ARGUMENTS]


def short_bucket(
    rows: Sequence[Prompt], together: int, buckets: Buckets = "rows", picture: str | None = None
) -> str | None:
    """What is wrong where a size has fewer rows than a micro-batch takes (`together`); None where none has. Of sizes
    that rows are dealt to in turn, each is to have some."""
    dealt = () if buckets == "rows" or picture else buckets
    counts = Counter({tuple(zip(NAMES, size, strict=False)): 0 for size in dealt})
    counts.update(row.bucket for row in rows)
    for size, count in sorted(counts.items()):
        if count < together:
            named = " x ".join(str(value) for _, value in size) or "the pipeline's own size"
            return (
                f"{named} has {count} of the {len(rows)} prompts, and a micro-batch is of {together}: it would never "
                "be drawn; give it more prompts, leave the size out, or lower sampling.batch_size"
            )
    return None


def _written(row: Prompt, source: str) -> Mapping[str, int]:
    size = {}
    for name in NAMES:
        value: Any = row.columns.get(name)
        if value is None:
            continue
        # True is an int in Python.
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PromptError(f"{source}:{row.line}: {name} must be a whole number above 0, found {value!r}")
        size[name] = value
    return size


def _nearest(row: Prompt, sizes: Sequence[dict[str, int]], picture: str, source: str) -> dict[str, int]:
    file = row.columns.get(picture)
    if not isinstance(file, str) or not Path(file).is_file():
        raise PromptError(f"{source}:{row.line}: no picture in the column {picture!r}, whose shape decides the bucket")
    try:
        width, height = picture_size(file)
    except ValueError as error:
        raise PromptError(f"{source}:{row.line}: {picture}: {error}") from error
    shape = width / height
    # The larger of both quotients, so that twice as wide is as far away as twice as high.
    ratios = [max(shape * size["height"] / size["width"], size["width"] / size["height"] / shape) for size in sizes]
    return sizes[ratios.index(min(ratios))]
