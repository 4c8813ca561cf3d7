"""Pictures that `genrl score` is given, of files, folders and .jsonl files, as rows; and their scores by one reward.

A row that cannot be used (broken JSON, a path outside the folder) is named, skipped and counted; what has no score is
never a zero.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import genrl_rewards
from genrl.data.rows import PICTURES, RowError, is_path, json_object, line_text, lines_of

if TYPE_CHECKING:
    import torch


SAMPLE_LIST, SAMPLE_GRID = "prompts.json", "grid.png"
"""What `genrl sample` writes beside its pictures: their list, and all of them in one."""
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
            files = sorted(p for p in source.iterdir() if p.suffix.lower() in PICTURES and p != overview)
            if not files:
                raise ValueError(f"{source}: no pictures in this folder ({', '.join(PICTURES)})")
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
                # A byte order mark, with which editors on Windows begin a file.
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
    if not resolved.is_relative_to(folder) and not (Path(path).is_absolute() and resolved.suffix.lower() in PICTURES):
        raise ValueError(f"{path!r} is outside the folder of the file; write it relative to it, without ..")
    return resolved


GROUP = "group"


@dataclass(frozen=True)
class Result:
    """What came of a row; NaN = no score."""

    row: Row
    score: float
    parts: Mapping[str, float]


def score_rows(
    reward: genrl_rewards.Reward,
    rows: Sequence[Row],
    *,
    name: str,
    batch_size: int,
    skip: Callable[[str], None],
) -> list[Result]:
    """Score rows in their order; those whose picture cannot be read are left out, and `skip` is told why.

    Pointwise rewards get pictures of one size, at most `batch_size` together. Others get a whole group: the rows with
    the same value in the column `group`, or else with the same prompt. Raises ValueError for rows that lack a prompt or
    a column that the reward needs, RewardFailed where it raised for too many.
    """
    needed = genrl_rewards.needs(reward)
    for row in rows:
        if row.prompt is None and (needed.prompts or (needed.kind != "pointwise" and GROUP not in row.columns)):
            raise ValueError(
                f"reward {name!r} needs a prompt, and {row.image} has none: give --prompt TEXT, or a .jsonl file "
                'with rows {"image": ..., "prompt": ...}'
            )
        genrl_rewards.check_columns(reward, row.columns, name=name)
    results: list[Result | None] = [None] * len(rows)
    failures: list[genrl_rewards.Failure] = []
    scored = 0
    for batch in _batches(rows, needed, batch_size, skip):
        members = [rows[k] for k, _ in batch]
        scores = genrl_rewards.score(
            reward,
            images=_stack([image for _, image in batch]),
            prompts=[row.prompt or "" for row in members],
            columns={c: [row.columns[c] for row in members] for c in needed.columns},
            group=[0] * len(members) if needed.kind != "pointwise" else None,
            name=name,
        )
        failures += scores.failures
        scored += len(members)
        for j, (k, _) in enumerate(batch):
            results[k] = Result(rows[k], scores.values[j], {part: values[j] for part, values in scores.parts.items()})
    first = genrl_rewards.first_failure(failures)
    genrl_rewards.check_failures(name, sum(f.samples for f in failures), scored, first)
    for failure in failures:
        skip(f"{failure.samples} pictures have no score: {failure.error}")
    return [result for result in results if result is not None]


Loaded = tuple[int, Any]  # row number and picture, uint8 array [H, W, 3]


def _batches(
    rows: Sequence[Row], needed: genrl_rewards.Needs, batch_size: int, skip: Callable[[str], None]
) -> Iterator[list[Loaded]]:
    if needed.kind != "pointwise":
        # As JSON: the value of a column may be a list or an object, which is no key.
        groups: dict[Any, list[int]] = {}
        for k, row in enumerate(rows):
            groups.setdefault(json.dumps(row.columns.get(GROUP, row.prompt)), []).append(k)
        for members in groups.values():
            loaded = list(_loaded(rows, members, skip))
            sizes = sorted({image.shape[:2] for _, image in loaded})
            if len(sizes) > 1:
                raise ValueError(f"the pictures of one group have different sizes (height, width): {sizes}")
            if loaded:
                yield loaded
        return
    waiting: list[Loaded] = []
    for item in _loaded(rows, range(len(rows)), skip):
        # Neighbours only, not all pictures of one size: rows are read once, and one batch at a time is in memory.
        if waiting and (len(waiting) == batch_size or item[1].shape != waiting[0][1].shape):
            yield waiting
            waiting = []
        waiting.append(item)
    if waiting:
        yield waiting


def _loaded(rows: Sequence[Row], chosen: Sequence[int], skip: Callable[[str], None]) -> Iterator[Loaded]:
    import numpy as np

    for k in chosen:
        try:
            yield k, np.asarray(genrl_rewards.open_picture(rows[k].path))
        except ValueError as error:
            skip(str(error))


def _stack(images: Sequence[Any]) -> torch.Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.stack(images)).movedim(-1, -3).to(torch.float32) / 255


def write_jsonl(results: Sequence[Result], stream: IO[str]) -> None:
    """One object per line: image, prompt, columns, score, parts; null = no score."""
    for result in results:
        row = {IMAGE: result.row.image, PROMPT: result.row.prompt, **result.row.columns}
        parts = {name: _nullable(value) for name, value in result.parts.items()}
        stream.write(json.dumps(row | {"score": _nullable(result.score), "parts": parts}, ensure_ascii=False) + "\n")


def write_csv(results: Sequence[Result], stream: IO[str]) -> None:
    """Columns image, prompt, score and one per part; an empty field = no score."""
    parts = list(dict.fromkeys(name for result in results for name in result.parts))
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([IMAGE, PROMPT, "score", *parts])
    for result in results:
        numbers = [result.score, *(result.parts.get(part, math.nan) for part in parts)]
        writer.writerow(
            [result.row.image, result.row.prompt or "", *("" if math.isnan(n) else repr(n) for n in numbers)]
        )


# NaN is no JSON: most readers refuse the whole file.
def _nullable(value: float) -> float | None:
    return None if math.isnan(value) else value
