"""What the commands print, for people, and write, for programs; and on which card a run fits, and which keys to change
where it does not. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from genrl.config.errors import ConfigError
from genrl.config.loading import load
from genrl.config.section import Section

if TYPE_CHECKING:
    from rich.console import RenderableType

console = Console(highlight=False)


def printable(text: str) -> str:
    """Remove terminal control characters: what is printed may come from prompts, keys and model files."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def safe(text: str) -> str:
    """Printable, and not read as rich's markup."""
    return escape(printable(text))


def number(count: float) -> str:
    """A count with thousands separators; with one decimal where it is a mean that is not whole."""
    return f"{round(count, 1):,}".removesuffix(".0")


def size(num_bytes: int) -> str:
    """Bytes in decimal units, three digits."""
    if num_bytes <= 0:
        return "-"
    exponent = min(3, int(math.log(num_bytes, 1000)))
    return f"{num_bytes / 1000**exponent:.3g} {('B', 'kB', 'MB', 'GB')[exponent]}"


def memory_table(parts: Sequence[tuple[str, int]]) -> Table:
    """What one process holds, part by part, in bytes, and the sum."""
    table = Table("part", "size", title="memory of one process (estimate), beside the libraries", title_justify="left")
    for name, num_bytes in parts:
        table.add_row(safe(name), size(num_bytes))
    table.add_section()
    table.add_row("sum", size(sum(num_bytes for _, num_bytes in parts)))
    return table


def add_course(table: Table, iterations: int, every: int, evaluated: str) -> None:
    """Rows of a run's length and of its evaluations: one every so many iterations (0: none), of what."""
    evaluations = 1 + math.ceil(iterations / every) if every else 0
    table.add_row("iterations", f"{iterations:,}", "")
    table.add_row("evaluations", f"{evaluations:,}", f"of {evaluated}" if every else "off")


def scores_table(title: str, *columns: str) -> Table:
    """An empty table of scores."""
    return Table(*columns, title=safe(title), title_justify="left")


def write_scores(out: Path | None, record: Mapping[str, Any], scores: Mapping[str, float]) -> None:
    """Write the record of an evaluation and its scores as one JSON object; a score that is not finite as null."""
    if out is None:
        return
    from genrl.runtime.folder.run import write_atomic

    finite = {name: value if math.isfinite(value) else None for name, value in scores.items()}
    write_atomic(out, json.dumps({**record, "scores": finite}, indent=1) + "\n")


def print_keys(config: Section) -> None:
    """Every key with its value, its default and its meaning."""
    for key, value, default, meaning in explained(config, ""):
        if value == default:
            console.print(f"{safe(key)}: {safe(value)}", soft_wrap=True)
        else:
            console.print(f"[bold]{safe(key)}: {safe(value)}[/bold]   (default {safe(default)})", soft_wrap=True)
        console.print(f"    [dim]{safe(meaning)}[/dim]", soft_wrap=True)


def explained(section: Section, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, value, default, meaning) of every leaf below `section`."""
    for name, value in section:
        field = type(section).model_fields[name]
        key = f"{prefix}{name}"
        if isinstance(value, Section):
            yield from explained(value, f"{key}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            for index, item in enumerate(value):
                yield from explained(item, f"{key}.{index}.")
        else:
            default = "required" if field.is_required() else written(field.default)
            yield key, written(value), default, type(section).meaning(name)


def written(value: Any) -> str:
    """The value as YAML would have it."""
    if isinstance(value, Section):
        return "a section"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def card_tables(
    file: Path,
    overrides: Sequence[str],
    changes: Iterable[str],
    peak: Callable[[Any], int],
    card: float | None,
    otherwise: str,
) -> list[RenderableType]:
    """Which cards a run fits on, with which changes; with `card`, in bytes, the changes one by one. otherwise: what is
    left to do where all of them are not enough."""
    all_steps = steps(file, overrides, changes, peak, card or CARDS[0] * 10**9)
    if card is not None:
        return _one_by_one(all_steps, fitting(all_steps, card), size(round(card)), otherwise)
    table = Table("card", "fits", title="cards", title_justify="left")
    for gigabytes in CARDS:
        enough = fitting(all_steps, gigabytes * 10**9)
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
    all_steps: Sequence[Step], enough: Sequence[Step] | None, card: str, otherwise: str
) -> list[RenderableType]:
    """The changes in their order, with the estimate after each, and whether that is enough."""
    shown = all_steps if enough is None else enough
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
    all_steps, taken = [Step("", peak(load(file, list(overrides))))], list(overrides)
    for change in changes:
        if all_steps[-1].num_bytes <= SHARE * card:
            break
        try:
            changed = load(file, [*taken, *change.split(" ")])
        except ConfigError:
            continue
        if (size := peak(changed)) <= 0.99 * all_steps[-1].num_bytes:
            all_steps.append(Step(change, size))
            taken += change.split(" ")
    return all_steps


def fitting(all_steps: Sequence[Step], card: float) -> list[Step] | None:
    """The shortest beginning of the steps after which a run fits on a card of so many bytes; None = not with all."""
    for end, step in enumerate(all_steps, start=1):
        if step.num_bytes <= SHARE * card:
            return list(all_steps[:end])
    return None
