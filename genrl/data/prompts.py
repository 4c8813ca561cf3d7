"""Prompt files -> rows. A prompt file is input from outside: dirty rows are reported with their line, never passed on.

Formats: `.txt` (one prompt per line; blank lines and lines that begin with `#` are skipped), `.jsonl` (one object per
line with the prompt's column and any others, which rewards ask for by name), and data sets as `id:split` (a hub id or a
folder that the `datasets` library reads).
"""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 10_000
MAX_LINE_BYTES = 1_000_000
MAX_DIRTY = 0.01  # share of dirty rows above which nothing is trained
_LISTED = 20
PREFERENCE_COLUMNS = ("image_win", "image_lose")  # of a preference set (`genrl.data.preferences`)


@dataclass(frozen=True)
class Prompt:
    """One row."""

    text: str
    """The prompt."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns; path columns hold absolute paths inside the prompt file's folder."""
    line: int = 0
    """Line in the file, or row of the data set, from 1."""


@dataclass(frozen=True)
class DirtyRow:
    """A row that is skipped."""

    where: str
    """file:line"""
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(frozen=True)
class PromptRows:
    """What a source holds."""

    rows: list[Prompt]
    skipped: list[DirtyRow]

    @property
    def column_names(self) -> list[str]:
        """Columns beside the prompt that every row has."""
        common = set.intersection(*(set(row.columns) for row in self.rows)) if self.rows else set()
        return sorted(common)


class PromptError(ValueError):
    """A source of prompts that cannot be used."""


class _Dirty(Exception):
    """This row cannot be used; the message says why."""


def load(source: str, column: str = "prompt") -> list[Prompt]:
    """The clean rows of `source`; skipped ones are logged. Raises PromptError as `read` does."""
    found = read(source, column)
    if found.skipped:
        logger.warning("%s: %d rows skipped\n%s", source, len(found.skipped), _listed(found.skipped))
    return found.rows


def read(source: str, column: str = "prompt") -> PromptRows:
    """Rows of a prompt file or data set, clean ones and dirty ones apart.

    Dirty: bytes that are not UTF-8, control characters (NUL, ANSI escapes), no text, more than 10,000 characters,
    broken JSON, a missing or misnamed column, text of another type, a path that leaves the file's folder.
    PromptError: no such source, unknown format, no prompts at all, or more than 1 % dirty rows (listed).
    """
    rows: list[Prompt] = []
    skipped: list[DirtyRow] = []
    for place, line, outcome in _outcomes(source, column):
        if isinstance(outcome, Prompt):
            rows.append(outcome)
        else:
            skipped.append(DirtyRow(f"{place}:{line}", outcome))
    if len(skipped) > MAX_DIRTY * (len(rows) + len(skipped)):
        share = f"{len(skipped)} of {len(rows) + len(skipped)} rows are dirty (the limit is {MAX_DIRTY:.0%})"
        raise PromptError(f"{source}: {share}; correct or remove them:\n{_listed(skipped)}")
    if not rows:
        raise PromptError(f"{source}: no prompts in it")
    return PromptRows(rows, skipped)


def missing_images(source: str, rows: Sequence[Prompt]) -> str | None:
    """What is wrong with the first row of a .jsonl file that has not both images of a pair; None where all have."""
    for row in rows:
        for column in PREFERENCE_COLUMNS:
            if row.columns.get(column) is None:
                return f"{source}:{row.line}: {no_image_column(column, list(row.columns))}"
    return None


def no_image_column(column: str, columns: Sequence[str]) -> str:
    """That a preference set lacks this column, in words."""
    close = get_close_matches(column, columns, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    found = ", ".join(map(repr, columns)) or "none beside the prompt"
    return f"no column {column!r}, found {found}{hint}. A preference set has the columns image_win and image_lose"


def _listed(skipped: Sequence[DirtyRow]) -> str:
    more = [f"... and {len(skipped) - _LISTED} more"] if len(skipped) > _LISTED else []
    return "\n".join([*map(str, skipped[:_LISTED]), *more])


def _outcomes(source: str, column: str) -> Iterator[tuple[str, int, Prompt | str]]:
    """(where, line, row or what is wrong with it) for every row."""
    path = Path(source)
    if path.suffix in (".txt", ".jsonl"):
        yield from _file_outcomes(path, column)
    elif path.is_file():
        raise PromptError(f"{source}: prompts are .txt (one per line), .jsonl (a column {column!r}) or id:split")
    elif ":" in source:
        yield from _dataset_outcomes(source, column)
    elif path.is_dir():
        raise PromptError(f"{source} is a folder; name a .txt or .jsonl file, or a data set's split as {source}:train")
    else:
        raise PromptError(
            f"{source}: not a prompt file (.txt, .jsonl){_nearest(path)}; a data set is written id:split, "
            f"for example {source}:train"
        )


def _nearest(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _file_outcomes(path: Path, column: str) -> Iterator[tuple[str, int, Prompt | str]]:
    if not path.is_file():
        raise PromptError(f"{path}: no such file{_nearest(path)}")
    folder = path.parent.resolve()
    with path.open("rb") as stream:
        for line, raw in enumerate(_lines(stream), start=1):
            try:
                row = _row(path.suffix, raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw, line, column, folder)
            except _Dirty as error:
                yield str(path), line, str(error)
            else:
                if row is not None:
                    yield str(path), line, row


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    # A hostile file may be one endless line: read no more of a line than what proves it too long.
    while line := stream.readline(MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_LINE_BYTES + 1)
        yield line


def _row(suffix: str, raw: bytes, line: int, column: str, folder: Path) -> Prompt | None:
    if len(raw) > MAX_LINE_BYTES:
        raise _Dirty(f"a line of more than {MAX_LINE_BYTES:,} bytes")
    try:
        text = raw.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise _Dirty(f"byte {raw[error.start]:#04x} at column {error.start + 1} is not UTF-8") from None
    if not text or (suffix == ".txt" and text.startswith("#")):
        return None
    if suffix == ".txt":
        return Prompt(_clean(text), {}, line)
    return _from_columns(_json_object(text), column, line, folder)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _Dirty(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise _Dirty("not JSON: nested too deeply") from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise _Dirty(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _Dirty(f"a row is an object {{...}}, found {_kind(value)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise _Dirty(f"the column {key!r} is written twice")
        value[key] = item
    return value


def _no_constant(name: str) -> Any:
    raise _Dirty(f"not JSON: {name} is not a number")


def _from_columns(row: Mapping[str, Any], column: str, line: int, folder: Path | None) -> Prompt:
    if column not in row:
        close = get_close_matches(column, list(row), n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        found = ", ".join(map(repr, row))[:200] or "none"  # the row's own, so of any length
        raise _Dirty(f"no column {column!r}, found {found}{hint} prompts.column names the one that holds the prompts")
    if not isinstance(row[column], str):
        raise _Dirty(f"the prompt must be text, found {_kind(row[column])}")
    text = _clean(row[column])
    others = {name: value for name, value in row.items() if name != column}
    if folder is None:  # a data set has no folder that a path could be held in
        return Prompt(text, {name: value for name, value in others.items() if not _is_path(name)}, line)
    columns = {name: _inside(name, value, folder) if _is_path(name) else value for name, value in others.items()}
    return Prompt(text, columns, line)


def _clean(text: str) -> str:
    if not text.strip():
        raise _Dirty("the prompt is empty")
    if len(text) > MAX_CHARACTERS:
        raise _Dirty(f"the prompt has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}")
    for position, character in enumerate(text, start=1):
        kind = unicodedata.category(character)
        if kind == "Cs" or (kind == "Cc" and character not in "\t\n\r"):
            raise _Dirty(f"character {ord(character):#06x} at position {position} is not text")
    return text


def _is_path(name: str) -> bool:
    return name.endswith(("_path", "image")) or name in PREFERENCE_COLUMNS


def _inside(name: str, value: Any, folder: Path) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise _Dirty(f"{name} must be a path as text, found {_kind(value)}")
    if not value or "\0" in value or "\\" in value or len(value) > 1000:
        raise _Dirty(f"{name}: {value[:60]!r} is not a path")
    written = Path(value)
    if written.is_absolute() or ".." in written.parts or value.startswith("~"):
        raise _Dirty(f"{name}: {value[:60]!r} leaves the folder of the prompt file; write it relative, without ..")
    try:
        resolved = (folder / written).resolve()
    except (OSError, RuntimeError):  # a loop of links, by Python version
        raise _Dirty(f"{name}: {value[:60]!r} cannot be followed") from None
    if not resolved.is_relative_to(folder):
        raise _Dirty(f"{name}: {value[:60]!r} is a link that leaves the folder of the prompt file")
    if not resolved.is_file():
        raise _Dirty(f"{name}: there is no file {value[:60]!r} beside the prompt file")
    return str(resolved)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _dataset_outcomes(source: str, column: str) -> Iterator[tuple[str, int, Prompt | str]]:
    name, _, split = source.partition(":")  # a split may be a slice: train[:90%]
    if not name or not split:
        raise PromptError(f"{source}: a data set is written id:split, for example org/name:train")
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # not found, no such split, no network
        raise PromptError(f"{source}: the data set cannot be loaded: {error}") from error
    if column not in rows.column_names:
        raise PromptError(f"{source}: no column {column!r}; it has {', '.join(rows.column_names)}. Set prompts.column")
    kept = [name for name in rows.column_names if name == column or not _is_path(name)]
    for line, row in enumerate(rows.select_columns(kept), start=1):
        try:
            yield source, line, _from_columns(row, column, line, None)
        except _Dirty as error:
            yield source, line, str(error)
