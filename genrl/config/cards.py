"""On which cards a run fits, and which keys to change where it does not. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genrl.config.errors import ConfigError
from genrl.config.loading import load

CARDS = (12, 16, 24, 40, 80)
"""GB of common cards."""
SHARE = 0.92
"""Of a card's memory that a run may take: the rest is the allocator's and the libraries'."""


@dataclass(frozen=True)
class Step:
    """A change, and the peak after it and all before."""

    change: str
    """As `key=value`; empty for the configuration as it is."""
    num_bytes: int


def steps(
    file: Path, overrides: Sequence[str], changes: Iterable[str], peak: Callable[[Any], int], card: float
) -> list[Step]:
    """The configuration as it is, and then one change after the other until it fits on a card of so many bytes. Left
    out is what the configuration has, what cannot be with it, and what saves less than a hundredth of its `peak`."""
    found, taken = [Step("", peak(load(file, list(overrides))))], list(overrides)
    for change in changes:
        if found[-1].num_bytes <= SHARE * card:
            break
        try:
            changed = load(file, [*taken, *change.split(" ")])
        except ConfigError:
            continue
        if (size := peak(changed)) <= 0.99 * found[-1].num_bytes:
            found.append(Step(change, size))
            taken += change.split(" ")
    return found


def fitting(found: Sequence[Step], card: float) -> list[Step] | None:
    """The shortest beginning of the steps after which a run fits on a card of so many bytes; None = not with all."""
    for end, step in enumerate(found, start=1):
        if step.num_bytes <= SHARE * card:
            return list(found[:end])
    return None
