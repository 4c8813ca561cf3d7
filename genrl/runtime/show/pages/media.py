"""The pictures, films and sounds of a run, and its prompts with their rewards, page by page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from genrl.runtime.folder.run import Run
from genrl.runtime.show.pages.state import Followed
from genrl.runtime.show.pictures import Samples, first_and_last

PROMPTS_PER_PAGE = 20
_SERVED = re.compile(r"samples/(step-\d+/)?[^/\\]+\.(png|wav)|videos/step-\d+/[^/\\]+\.gif")


class Picture(NamedTuple):
    """A sheet of samples."""

    name: str
    """In words: "Samples at step 20"."""
    path: Path


def pictures(run: Run) -> list[Picture]:
    """The sheets in samples/ but for before_after.png: first those without a step, then the others, newest first."""
    grids = sorted(run.samples.glob("step-*.png"), key=lambda path: (path.stem[:11], -len(path.stem)), reverse=True)
    others = [path for path in sorted(run.samples.glob("*.png")) if path not in grids and path.stem != "before_after"]
    return [Picture(_in_words(path.stem), path) for path in [*others, *grids]]


def films(run: Run) -> list[Path]:
    """The gifs of the newest evaluation that has some."""
    return _newest(run.videos.glob("step-*/*.gif"), lambda path: path.parent.name)


def sounds(run: Run) -> list[Path]:
    """The .wav files of the newest evaluation that has some."""
    return _newest(run.samples.glob("step-*.wav"), lambda path: path.name[:11])


def served(run: Run, name: str) -> Path | None:
    """The file of this name in the run folder, where it is a picture, film or sound that lies there itself; else None.

    name: relative, with `/`. Whatever is not of such a form, or leads out of the folder by a link, is no file of it.
    """
    if not _SERVED.fullmatch(name):
        return None
    path = (run.folder / name).resolve()
    return path if path.is_relative_to(run.folder.resolve()) and path.is_file() else None


class Compared(NamedTuple):
    """A prompt, and of each run its samples before and now: (index, file, rewards as text), None where it has none."""

    prompt: str
    runs: list[list[tuple[int, Path, str] | None]]


class PromptPage(NamedTuple):
    """Some of the prompts of the pictures."""

    rows: list[Compared]
    number: int
    """From 0."""
    pages: int
    prompts: int
    """On all pages."""


def prompt_page(runs: Sequence[Followed], number: int, find: str = "") -> PromptPage:
    """Page `number`, or the nearest that there is, of the prompts in which the text `find` is, in any case. Prompts of
    several runs that are equal share a row."""
    ends = [_ends(run.run) for run in runs]
    rows: dict[tuple[str, int], None] = {}
    places: list[list[dict[tuple[str, int], int]]] = []
    for first_last in ends:
        places.append([])
        for samples in first_last:
            counts: Counter[str] = Counter()
            place = {}
            for i, prompt in enumerate(samples.prompts):
                place[prompt, counts[prompt]] = i
                counts[prompt] += 1
            places[-1].append(place)
            rows |= dict.fromkeys(key for key in place if find.lower() in key[0].lower())
    pages = max(1, -(-len(rows) // PROMPTS_PER_PAGE))
    number = max(0, min(number, pages - 1))
    page_rows = list(rows)[number * PROMPTS_PER_PAGE : (number + 1) * PROMPTS_PER_PAGE]
    cards = [
        Compared(
            key[0], [[_cell(*pair, key) for pair in zip(*both, strict=True)] for both in zip(ends, places, strict=True)]
        )
        for key in page_rows
    ]
    return PromptPage(cards, number, pages, len(rows))


def prompt_table(run: Run, most: int) -> tuple[list[list[str]], int]:
    """(table, prompts left out): the first `most` prompts with their rewards at the first and the last evaluation."""
    ends = _ends(run)
    if not ends:
        return [], 0
    first, last = ends
    names = list(last.rewards)
    table = [["prompt", *(f"{name}, {word}" for name in names for word in ("before", "now"))]]
    for i, prompt in enumerate(last.prompts[:most]):
        table.append([prompt, *(_score(samples, name, i) for name in names for samples in ends)])
    return table, max(0, len(last.prompts) - most)


def _ends(run: Run) -> list[Samples]:
    """The first and the last samples, which may be the same; [] where there are none."""
    files = first_and_last(run.samples)
    return [files[0], files[-1]] if files else []


def _cell(samples: Samples, place: dict[tuple[str, int], int], key: tuple[str, int]) -> tuple[int, Path, str] | None:
    i = place.get(key)
    if i is None:
        return None
    scores = (f"{name} {_score(samples, name, i)}" for name in samples.rewards)
    return samples.step, samples.files[i], ", ".join(scores)


def _score(samples: Samples, name: str, i: int) -> str:
    scores: Any = samples.rewards.get(name, [])
    value = scores[i] if i < len(scores) else None
    return "no score" if value is None else f"{value:.3f}"


def _newest(paths: Iterator[Path], step: Any) -> list[Path]:
    ordered = sorted(paths)
    newest = max(map(step, ordered), default=None)
    return [path for path in ordered if step(path) == newest]


def _in_words(stem: str) -> str:
    """`step-000020` and `step-000020-best-worst` in words."""
    step, _, what = stem.removeprefix("step-").partition("-")
    if not step.isdecimal():
        return stem.replace("_", " ").capitalize()
    return f"{what.replace('-', ' and ').capitalize() or 'Samples'} at step {int(step)}"
