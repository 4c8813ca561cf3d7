"""Prompt files -> rows. Rows that cannot be used are reported with their line, never passed on (`genrl.data.rows`).

Formats: `.txt` (one prompt per line; blank lines and lines that begin with `#` are skipped), `.jsonl` (one object per
line with the prompt's column and any others, which rewards ask for by name), and data sets as `id:split` or
`id:config:split` (a hub id or a folder that the `datasets` library reads); and what a script hands over: a list of
texts or of rows, or a `datasets.Dataset`. Columns of pictures hold paths: where a data
set has the pictures themselves, each is written once, under its hash, into the cache of that library.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from genrl.config.folders import POINTER, nearest_beside
from genrl.data.rows import (
    RowError,
    checked_text,
    is_path,
    json_object,
    line_text,
    lines_of,
    no_column,
    text_and_columns,
)
from genrl_rewards.given import given, is_given
from genrl_rewards.pictures import open_picture

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

FILES = (".txt", ".jsonl")
DATA_SET = re.compile(r"(?P<name>[^:]+):(?:(?P<config>[^:\[\]]+):)?(?P<split>[^:\[\]]+(?:\[[^\[\]]*\])?(?:\+.*)?)")
"""A split may be a slice, `train[:90%]`, or a sum of some."""
TABLES = {"parquet": (".parquet",), "csv": (".csv", ".tsv"), "json": (".jsonl",), "arrow": (".arrow",)}
"""Ends of the names of tables, by what `datasets` calls their reader; .json may be anything, and is not counted."""
MAX_DIRTY = 0.01
"""Share of dirty rows above which a source is refused."""
_LISTED = 20


@dataclass(frozen=True)
class Prompt:
    """One row."""

    text: str
    """The prompt."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns; path columns hold absolute paths inside the prompt file's folder."""
    line: int = 0
    """Line in the file, or row of the data set, from 1."""
    size: Mapping[str, int] = field(default_factory=dict)
    """Its own arguments of the pipeline's call (`genrl.data.sizes`): height, width, num_frames; empty = as for all."""

    @property
    def bucket(self) -> tuple[tuple[str, int], ...]:
        """Size of its samples, to be compared and counted."""
        return tuple(self.size.items())


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
    comments: int = 0
    """Lines that begin with #, of a text file."""

    def __str__(self) -> str:
        """How many there are, in words."""
        besides = f" ({self.comments} lines that begin with # are left out)" if self.comments else ""
        return f"{len(self.rows):,} prompts{besides}"

    @property
    def column_names(self) -> list[str]:
        """Columns beside the prompt that every row has."""
        common = set.intersection(*(set(row.columns) for row in self.rows)) if self.rows else set()
        return sorted(common)


class PromptError(ValueError):
    """A source of prompts that cannot be used."""


def load(source: str, column: str = "prompt", *, pictures: bool = True) -> list[Prompt]:
    """The clean rows of `source`; skipped ones are logged. Raises PromptError as `read` does."""
    result = read(source, column, pictures=pictures)
    if result.comments:
        logger.info("%s: %s", source, result)
    if result.skipped:
        logger.warning("%s: %d rows skipped\n%s", source, len(result.skipped), _listed(result.skipped))
    return result.rows


def read(source: str, column: str = "prompt", *, pictures: bool = True, chat: bool = False) -> PromptRows:
    """Rows of a prompt file or data set, clean ones and dirty ones apart.

    pictures: False = without the picture columns of a data set, for those who read them by themselves.
    chat: a .jsonl file's prompt may be a list of messages, which are a column, too, and a path a list of paths.
    Dirty: bytes that are not UTF-8, control characters (NUL, ANSI escapes), no text, more than 10,000 characters,
    broken JSON, a missing or misnamed column, text of another type, a path that leaves the file's folder.
    PromptError: no such source, unknown format, no prompts at all, or more than 1 % dirty rows (listed).
    """
    rows: list[Prompt] = []
    skipped: list[DirtyRow] = []
    comments = 0
    for line, outcome in _outcomes(source, column, pictures, chat):
        if outcome is None:
            comments += 1
        elif isinstance(outcome, Prompt):
            rows.append(outcome)
        else:
            skipped.append(DirtyRow(f"{source}:{line}", outcome))
    # Few dirty rows are noise of a large crawl; many mean that the column or the format is not what was meant.
    if len(skipped) > MAX_DIRTY * (len(rows) + len(skipped)):
        share = f"{len(skipped)} of {len(rows) + len(skipped)} rows are dirty (the limit is {MAX_DIRTY:.0%})"
        raise PromptError(f"{source}: {share}; correct or remove them:\n{_listed(skipped)}")
    if not rows:
        raise PromptError(f"{source}: no prompts in it")
    return PromptRows(rows, skipped, comments)


def is_data_set(source: str) -> bool:
    """Whether `source` is written as a data set, `id:split`, which may have to be downloaded."""
    return ":" in source and not is_given(source) and Path(source).suffix not in FILES and not Path(source).exists()


def open_data_set(source: str) -> Dataset:
    """The table of `id:split` or `id:config:split`; a split may be a slice, `train[:90%]`. Raises PromptError where it
    cannot be loaded."""
    match = DATA_SET.fullmatch(source)
    if match is None:
        text = "a data set is written id:split or id:config:split, for example org/name:train"
        raise PromptError(f"{source}: {text}")
    from datasets import ClassLabel, load_dataset
    from datasets.exceptions import DatasetsError

    try:
        table = load_dataset(match["name"], match["config"], split=match["split"])
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:  # not found, no such split, no network, broken
        hint = "; for example `Dataset.to_parquet`, and then its folder" if "load_from_disk" in str(error) else ""
        raise PromptError(f"{source}: the data set cannot be loaded: {error.__cause__ or error}{hint}") from error
    _say_unread(match["name"], table.builder_name)
    for name, kind in table.features.items():
        if isinstance(kind, ClassLabel):
            labels = ", ".join(kind.names[:4])
            logger.warning("%s: the column %r gives labels (%s...) as their numbers, from 0", source, name, labels)
    return table


def _say_unread(folder: str, reader: str) -> None:
    """Name the tables in a local folder that `datasets` has not read: it takes those of one format, without a word."""
    if reader not in TABLES or not Path(folder).is_dir():
        return
    others = {suffix for name, suffixes in TABLES.items() if name != reader for suffix in suffixes}
    unread = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.suffix in others)
    if unread:
        names = ", ".join(unread[:_LISTED]) + (", ..." if len(unread) > _LISTED else "")
        logger.warning("%s: of this folder only the %s files are read; not read: %s", folder, reader, names)


def open_picture_table(source: str, *columns: str) -> Dataset:
    """The data set `id:split`, with undecoded pictures in these columns. Raises PromptError where one is missing."""
    table = open_data_set(source)
    from datasets import Image

    for column in columns:
        if column not in table.column_names:
            raise PromptError(f"{source}: {no_column(column, table.column_names)}")
        table = table.cast_column(column, Image(decode=False))
    return table


def _listed(skipped: Sequence[DirtyRow]) -> str:
    more = [f"... and {len(skipped) - _LISTED} more"] if len(skipped) > _LISTED else []
    return "\n".join([*map(str, skipped[:_LISTED]), *more])


def _outcomes(source: str, column: str, pictures: bool, chat: bool) -> Iterator[tuple[int, Prompt | str | None]]:
    """(line, row or what is wrong with it) for every row; None for a line that begins with #."""
    path = Path(source)
    if is_given(source):
        yield from _of_objects(given(source), source, column, pictures)
    elif path.suffix in FILES:
        yield from _of_file(path, column, chat)
    elif path.is_file():
        raise PromptError(f"{source}: prompts are .txt (one per line), .jsonl (a column {column!r}) or id:split")
    elif is_data_set(source):
        yield from _of_data_set(open_data_set(source), source, column, pictures)
    elif path.is_dir():
        raise PromptError(f"{source} is a folder; name a .txt or .jsonl file, or a data set's split as {source}:train")
    else:
        raise PromptError(
            f"{source}: not a prompt file (.txt, .jsonl){nearest_beside(path)}; a data set is written id:split, "
            f"for example {source}:train"
        )


def _of_file(path: Path, column: str, chat: bool) -> Iterator[tuple[int, Prompt | str | None]]:
    if not path.is_file():
        raise PromptError(f"{path}: no such file{nearest_beside(path)}")
    folder = path.parent.resolve()
    with path.open("rb") as stream:
        for line, raw in enumerate(lines_of(stream), start=1):
            if line == 1 and raw.lower().startswith((POINTER, b"<!doctype", b"<html")):
                what = "a Git LFS pointer: run `git lfs pull`" if raw.startswith(POINTER) else "a page in HTML"
                raise PromptError(f"{path} is {what}")
            try:
                # Editors on Windows begin a file with a byte order mark, which would be part of the first prompt.
                text = line_text(raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw)
                if not text:
                    continue
                if path.suffix == ".txt" and text.startswith("#"):
                    yield line, None
                elif path.suffix == ".txt":
                    yield line, Prompt(checked_text(text), {}, line)
                else:
                    yield line, Prompt(*text_and_columns(json_object(text), column, folder, chat=chat), line)
            except RowError as error:
                yield line, str(error)


def _of_objects(rows: Any, source: str, column: str, pictures: bool) -> Iterator[tuple[int, Prompt | str]]:
    """Rows of a script: texts, mappings with the prompt's column, or a table of the `datasets` library."""
    if hasattr(rows, "cast_column"):
        yield from _of_data_set(rows, source, column, pictures)
        return
    for line, row in enumerate(rows, start=1):
        try:
            if isinstance(row, str):
                yield line, Prompt(checked_text(row), {}, line)
            elif isinstance(row, Mapping):
                of_pictures = {name: value for name, value in row.items() if _is_picture(value)}
                plain = {name: value for name, value in row.items() if name not in of_pictures}
                text, columns = text_and_columns(plain, column, None)
                paths = {name: _picture_path(value, name) for name, value in of_pictures.items()}
                yield line, Prompt(text, columns | paths, line)
            else:
                yield line, f"a prompt is text or a mapping with the column {column!r}, found {type(row).__name__}"
        except RowError as error:
            yield line, str(error)


def _of_data_set(table: Any, source: str, column: str, pictures: bool) -> Iterator[tuple[int, Prompt | str]]:
    if column not in table.column_names:
        raise PromptError(f"{source}: {no_column(column, table.column_names)} (prompts.column names it)")
    from datasets import Image

    picture_columns = [name for name, kind in table.features.items() if _holds_pictures(name, kind)]
    # Undecoded: the bytes are written as they are, and decoding every picture to read the prompts would take hours.
    for name in picture_columns:
        table = table.cast_column(name, Image(decode=False))
    kept = picture_columns if pictures else []
    plain = [
        name for name in table.column_names if name == column or (name not in picture_columns and not is_path(name))
    ]
    for line, row in enumerate(table.select_columns([*plain, *kept]), start=1):
        try:
            text, columns = text_and_columns({name: row[name] for name in plain}, column, None)
            yield line, Prompt(text, columns | {name: _written(name, row[name]) for name in kept}, line)
        except RowError as error:
            yield line, str(error)


def _written(name: str, cell: Any) -> str | None:
    """The path of a data set's undecoded picture; one without a file is written. Raises RowError where it is none."""
    if cell is None:
        return None
    raw, path = cell["bytes"], cell["path"]
    if raw is None:
        if path is None or not Path(path).is_file():
            raise RowError(f"{name}: there is no file {path!r}")
        return str(Path(path).resolve())
    return _kept(raw)


def _holds_pictures(name: str, kind: Any) -> bool:
    """Whether a column of a data set is of pictures: of the type `Image`, or named like one and of `{bytes, path}` or
    bytes, as files have it that the library did not write."""
    from datasets import Image

    if isinstance(kind, Image) or not is_path(name) or name.endswith("_path"):
        return isinstance(kind, Image)
    fields = {*kind} if isinstance(kind, dict) else set()
    return fields == {"bytes", "path"} or getattr(kind, "dtype", None) in ("binary", "large_binary")


def _is_picture(value: Any) -> bool:
    """Whether a value of a script is a picture: PIL, numpy, bytes, `{bytes, path}`."""
    kinds = hasattr(value, "save"), hasattr(value, "__array_interface__") and getattr(value, "ndim", 0) > 1
    return any(kinds) or isinstance(value, bytes) or (isinstance(value, Mapping) and {"bytes", "path"} == {*value})


def _picture_path(picture: Any, name: str) -> str:
    """The path of a picture of a script. Raises RowError where it is none."""
    held = io.BytesIO()
    try:
        open_picture(picture).save(held, "PNG")
    except ValueError as error:
        raise RowError(f"{name}: {error}") from error
    return _kept(held.getvalue())


def _kept(raw: bytes) -> str:
    """The path of a picture's bytes, which are written once, under their hash."""
    from datasets.config import HF_DATASETS_CACHE

    file = Path(HF_DATASETS_CACHE) / "genrl-pictures" / hashlib.sha256(raw).hexdigest()
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder: only there is the rename below atomic.
        with NamedTemporaryFile(dir=file.parent, delete=False) as stream:  # several processes may write the same
            stream.write(raw)
        Path(stream.name).replace(file)
    return str(file)
