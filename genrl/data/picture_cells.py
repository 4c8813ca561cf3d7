"""Columns of pictures of data sets, as `genrl_rewards.pictures` opens them: paths and bytes, not decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genrl.data.prompts import PromptError, open_data_set
from genrl.data.rows import no_column

if TYPE_CHECKING:
    from datasets import Dataset


def open_picture_table(source: str, *columns: str) -> Dataset:
    """The data set `id:split`, with undecoded pictures in these columns. Raises PromptError where one is missing."""
    table = open_data_set(source)
    from datasets import Image

    for column in columns:
        if column not in table.column_names:
            raise PromptError(f"{source}: {no_column(column, table.column_names)}")
        table = table.cast_column(column, Image(decode=False))
    return table
