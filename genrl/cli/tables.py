"""What the commands print, for people, and write, for programs. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from genrl.config.section import Section

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
