"""A row of the table of drills."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Of how many tries the outcome was right, and what was lost."""

    drill: str
    tries: int
    survived: int
    lost: str
    notes: tuple[str, ...] = ()
    """What went wrong, one line each."""
