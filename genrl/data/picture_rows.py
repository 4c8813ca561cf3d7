"""The pictures that `genrl score` is given, as rows: files, folders of them, and .jsonl files.

A row that cannot be used (broken JSON, a path outside the folder) is named, skipped and counted, never a score of zero.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genrl.data.rows import PICTURES, RowError, is_path, json_object, line_text, lines_of

SAMPLE_LIST, SAMPLE_GRID = "prompts.json", "grid.png"
"""What `genrl sample` writes beside its pictures: their list, and all of them in one."""
SUFFIXES = PICTURES
IMAGE, PROMPT = "image", "prompt"


@dataclass(frozen=True)
class Row:
    """A picture to score."""

    image: str
    """Its path as it was given."""
    path: Path
    prompt: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


def rows_of(sources: Sequence[Path], prompt: str | None) -> Iterator[Row | str]:
    """The rows of picture files, folders of them (subfolders and the grid of `genrl sample` aside) and .jsonl files;
    for a line that is no row, what is wrong with it.

    A .jsonl row is `{"image": path, "prompt": text, ...}`; further keys are columns. Its paths are relative to the file
    and stay inside its folder. `prompt` is given to rows without one. Raises ValueError for a source that does not
    exist, and for a folder or file without pictures.
    """
    for source in sources:
        if source.suffix == ".jsonl" and source.is_file():
            yield from _of_lines(source, prompt)
        elif source.is_dir():
            overview = source / SAMPLE_GRID if sampled_pictures(source) else None  # not a picture of any one prompt
            files = sorted(p for p in source.iterdir() if p.suffix.lower() in SUFFIXES and p != overview)
            if not files:
                raise ValueError(f"{source}: no pictures in this folder ({', '.join(SUFFIXES)})")
            yield from (Row(str(file), file, prompt) for file in files)
        elif source.is_file():
            yield Row(str(source), source, prompt)
        else:
            raise ValueError(f"{source}: no such file or folder")


def sampled_pictures(folder: Path) -> list[Path]:
    """The pictures in this folder that `genrl sample` made, by its list; none where there is no such list."""
    try:
        record = json.loads((folder / SAMPLE_LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # no such file, or another program's
        return []
    names = [row.get("file") for row in record if isinstance(row, dict)] if isinstance(record, list) else []
    return [folder / name for name in names if isinstance(name, str) and re.fullmatch(r"\d{5,}\.png", name)]


def _of_lines(file: Path, prompt: str | None) -> Iterator[Row | str]:
    folder = file.parent.resolve()
    number = 0
    with file.open("rb") as stream:
        for number, line in enumerate(lines_of(stream), start=1):
            try:
                if text := line_text(line.removeprefix(b"\xef\xbb\xbf")):
                    yield _of_line(json_object(text), folder, prompt)
            except (ValueError, RowError) as error:
                yield f"{file}:{number}: {error}"
    if number == 0:
        raise ValueError(f'{file}: no rows in this file; a row is {{"image": "a.png", "prompt": "..."}}')


def _of_line(value: Mapping[str, Any], folder: Path, prompt: str | None) -> Row:
    if not isinstance(value.get(IMAGE), str):
        raise ValueError('a row is an object with the path of a picture: {"image": "a.png", "prompt": "..."}')
    text = value.get(PROMPT, prompt)
    if text is not None and not isinstance(text, str):
        raise ValueError("the prompt must be text")
    columns = {name: item for name, item in value.items() if name not in (IMAGE, PROMPT)}
    for name, item in columns.items():
        if is_path(name) and isinstance(item, str):
            columns[name] = str(_inside(item, folder))
    return Row(value[IMAGE], _inside(value[IMAGE], folder), text, columns)


def _inside(path: str, folder: Path) -> Path:
    resolved = (folder / path).resolve()
    # An absolute path is the user's own choice, and as a picture it is only decoded: nothing of another file can leak.
    if not resolved.is_relative_to(folder) and not (Path(path).is_absolute() and resolved.suffix.lower() in SUFFIXES):
        raise ValueError(f"{path!r} is outside the folder of the file; write it relative to it, without ..")
    return resolved
