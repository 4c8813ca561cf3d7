"""What `genrl check` says of cards: on which a run fits, and which keys to change where it does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from genrl.cli.tables import safe, size
from genrl.config.errors import ConfigError
from genrl.config.loading import load

if TYPE_CHECKING:
    from rich.console import RenderableType


def tables(
    file: Path,
    overrides: Sequence[str],
    changes: Iterable[str],
    peak: Callable[[Any], int],
    card: float | None,
    otherwise: str,
) -> list[RenderableType]:
    """Which cards a run fits on, with which changes; with `card`, in bytes, the changes one by one. otherwise: what is
    left to do where all of them are not enough."""
    found = steps(file, overrides, changes, peak, card or CARDS[0] * 10**9)
    if card is not None:
        return _one_by_one(found, fitting(found, card), size(round(card)), otherwise)
    table = Table("card", "fits", title="cards", title_justify="left")
    for gigabytes in CARDS:
        enough = fitting(found, gigabytes * 10**9)
        made = [step.change for step in enough or () if step.change]
        answer = "no" if enough is None else f"with {', '.join(made)}" if made else "yes"
        table.add_row(f"{gigabytes} GB", answer)
    return [table]


def smallest(num_bytes: float) -> str:
    """The smallest card on which so much fits."""
    return next((f"{card} GB" for card in CARDS if num_bytes <= SHARE * card * 10**9), f"over {CARDS[-1]} GB")


def card_bytes(text: str) -> float:
    """Bytes of a card's memory as `--memory` is written. Raises BadParameter for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:GB)?", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise typer.BadParameter(f"{text!r} is no size of memory; write for example 24GB", param_hint="--memory")
    return float(match[1]) * 10**9


def _one_by_one(
    found: Sequence[Step], enough: Sequence[Step] | None, card: str, otherwise: str
) -> list[RenderableType]:
    """The changes in their order, with the estimate after each, and whether that is enough."""
    shown = found if enough is None else enough
    table = Table("change", "estimate", title=f"on {card}", title_justify="left")
    for step in shown:
        table.add_row(safe(step.change) or "as it is", size(step.num_bytes))
    if enough is None:
        return [table, f"it does not fit with all of these; {otherwise}"]
    made = len(enough) - 1
    above = f"with the {made} changes above" if made > 1 else "with the change above" if made else "as it is"
    return [table, f"it fits {above}"]


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
