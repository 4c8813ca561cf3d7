"""What `genrl check` says of cards: on which a run fits, and which keys to change where it does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from genrl.cli.tables import safe, size
from genrl.config.cards import CARDS, SHARE, Step, fitting, steps

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
