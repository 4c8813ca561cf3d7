"""What the templates show of one run, or of several side by side: figures, tables, facts. No HTML is made here.

The pictures, films and sounds of a run, and its prompts with their rewards, page by page.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from genrl.config.json_schemas import method_of
from genrl.config.method import MetricDoc, headings
from genrl.config.yaml_source import plain
from genrl.runtime.folder.contents import leaves
from genrl.runtime.folder.metrics import by_heading, catalogue, document
from genrl.runtime.folder.run import Run
from genrl.runtime.loop.progress import duration
from genrl.runtime.show.curves import Point, chart
from genrl.runtime.show.pages.state import Column, Followed, spent
from genrl.runtime.show.pictures import Samples, first_and_last

Table = list[list[str]]
"""Rows of cells, the head first; nothing but a head is an empty table."""
Documented = Mapping[str, Mapping[str, MetricDoc]]


class Headline(NamedTuple):
    """A large chart at the top."""

    caption: str
    lines: tuple[tuple[str, str], ...]
    """(key, what it is)"""


class Section(NamedTuple):
    """A heading of the catalogue of metrics."""

    title: str
    keys: list[str]
    """With a curve each."""
    constants: list[str]
    """`key = value` of those that never change."""


REWARD = Headline(
    "total reward, mean", (("reward/total_mean", "training prompts"), ("eval/total_mean", "held-out prompts"))
)
SUCCESS = Headline("success rate", (("rollout/success", "with exploration"), ("eval/success_mean", "evaluation")))
COLOURS = 8
"""Of lines, in base.css."""


def acts(run: Followed) -> bool:
    """Whether it trains a policy in an environment, whose figure is success."""
    return any(key in run.columns for key, _ in SUCCESS.lines)


def headlines(runs: Sequence[Followed]) -> list[Headline]:
    """Charts: of one run one with all lines; of several, one per line, with all runs."""
    kinds = [SUCCESS] * any(acts(run) for run in runs) + [REWARD] * any(not acts(run) for run in runs)
    charts = []
    for kind in kinds:
        lines = [line for line in kind.lines if any(_known(run.columns, line[0]) for run in runs)]
        if len(runs) == 1:
            charts += [Headline(kind.caption, tuple(lines))] if lines else []
        else:
            charts += [Headline(f"{kind.caption}, {line[1]}", (line,)) for line in lines]
    return charts


def headline_figure(runs: Sequence[Followed], headline: Headline) -> dict[str, Any]:
    """`caption`, `names` (the legend, where there is one of its own) and `svg`."""
    if len(runs) == 1:
        series = [(label, _points(runs[0], key)) for key, label in headline.lines]
    else:
        series = [(run.name, _points(run, headline.lines[0][0])) for run in runs]
    names = [name for name, _ in series] if len(runs) == 1 else []
    svg = chart(series, width=1080 if len(runs) == 1 else 540, height=300)
    return {"caption": headline.caption, "names": names, "svg": svg}


def gains(runs: Sequence[Followed]) -> Table:
    """The held-out rewards, or success, before and now."""
    many = ["run"] * (len(runs) > 1)
    what = "evaluation" if any(acts(run) for run in runs) else "held-out reward"
    table = [[what, *many, "before", "now", "change", "best"]]
    keys = {key for run in runs for key in run.columns if key.startswith("eval/")}
    keys = {key for key in keys if key.endswith("_mean") or "/success/" in key} - {"eval/length_mean"}  # least is best
    for key in sorted(keys, key=lambda key: (key not in ("eval/total_mean", "eval/success_mean"), _reward(key))):
        for run in runs:
            if not _known(run.columns, key):
                continue
            points = run.columns[key].known()
            (first_step, first), (last_step, last) = points[0], points[-1]
            best_step, best = max(points, key=lambda point: point[1])
            table.append(
                [_reward(key), *([run.name] if many else []), f"{first:.3f} (step {first_step})",
                 f"{last:.3f} (step {last_step})", f"{last - first:+.3f}", f"{best:.3f} (step {best_step})"]
            )  # fmt: skip
    return table


@lru_cache(maxsize=64)
def documented(configs: tuple[str, ...]) -> Documented:
    """The catalogue of metrics, and what methods from outside document, where they are still there."""
    headings_by: dict[str, Mapping[str, MetricDoc]] = {}
    for config in configs:
        method = method_of(plain(config)) if config else None
        headings_by |= {} if method is None else headings(method)
    return {**headings_by, **by_heading()}


def sections(runs: Sequence[Followed]) -> list[Section]:
    """All keys by the headings of the catalogue; without those that have none to show."""
    documents = documented(tuple(run.config for run in runs))
    titles = {id(doc): title for title, entries in documents.items() for doc in entries.values()}
    by_title = {title: Section(title, [], []) for title in [*documents, "Other"]}
    for key in sorted({key for run in runs for key in run.columns}):
        section = by_title[titles.get(id(_document(key, documents)), "Other")]
        columns = [run.columns[key] for run in runs if key in run.columns]
        if all(column.is_constant for column in columns):
            section.constants.append(f"{key} = {', '.join(dict.fromkeys(f'{column.low:g}' for column in columns))}")
        else:
            section.keys.append(key)
    return [section for section in by_title.values() if section.keys or section.constants]


def figure(runs: Sequence[Followed], key: str) -> dict[str, Any]:
    """One metric: `key`, `hint` (formula and reading), `missing` rows without a value, `alarm` (there are no others),
    `last` value of each run, empty where it has none, and `svg`."""
    doc = _document(key, documented(tuple(run.config for run in runs)))
    columns = [run.columns.get(key, Column()) for run in runs]
    missing = sum(column.missing for column in columns)
    return {
        "key": key,
        "hint": f"{doc.formula}. {doc.reading}" if doc else "of another version, or of a method that is gone",
        "missing": missing,
        "alarm": missing == sum(len(column.steps) for column in columns),  # some are without by design
        "last": ["" if column.last is None else f"{column.last:.4g}" for column in columns],
        "svg": chart([(run.name, column.points()) for run, column in zip(runs, columns, strict=True)]),
    }


def timings(runs: Sequence[Followed]) -> Table:
    """Table of where the time went."""
    many = len(runs) > 1
    table = [["phase", *(["run"] * many), "times", "mean", "total", "share"]]
    for key in (key for key in catalogue() if key.startswith("timing/")):
        for run in runs:
            if key not in run.columns:
                continue
            values, whole = [value for _, value in run.columns[key].known()], spent(run.columns)
            total = math.fsum(values)
            mean = f"{total / len(values):.3g} s" if values else "-"
            phase = key.removeprefix("timing/").removesuffix("_s")
            share = f"{total / whole:.0%}" if whole else "-"
            table.append([phase, *([run.name] * many), str(len(values)), mean, duration(total), share])
    return table


def differences(runs: Sequence[Followed]) -> Table:
    """The settings in which runs differ, but for where they write."""
    flat_settings = [leaves(run.settings) for run in runs]
    table = [["setting", *(run.name for run in runs)]]
    for key in dict.fromkeys(key for values in flat_settings for key in values):
        cells = [str(values.get(key, "-")) for values in flat_settings]
        if len(set(cells)) > 1 and key != "output":
            table.append([key, *cells])
    return table


def facts(run: Followed) -> list[str]:
    """When, with what seed and from which commit it was started, and how long it has computed."""
    info, rows = run.info, []
    if seconds := spent(run.columns):
        rows.append(duration(seconds))
    if "started" in info:
        rows.append(f"started {info['started'][:16].replace('T', ' ')} UTC")
    if {"seed", "processes"} <= info.keys():  # another program's run.json may have one of them
        rows.append(f"seed {info['seed']}, {info['processes']} process{'es' if info['processes'] != 1 else ''}")
    if info.get("git_commit"):
        rows.append(f"commit {info['git_commit'][:10]}{'+' if info['git_commit'].endswith('+') else ''}")
    if info.get("resumed"):
        rows.append("resumed at step " + ", ".join(str(entry["step"]) for entry in info["resumed"]))
    return rows


def _known(columns: Mapping[str, Column], key: str) -> bool:
    return key in columns and columns[key].missing < len(columns[key].steps)


def _points(run: Followed, key: str) -> list[Point]:
    return run.columns[key].points() if key in run.columns else []


def _reward(key: str) -> str:
    return key.removeprefix("eval/").removesuffix("_mean")


def _document(key: str, known: Documented) -> MetricDoc | None:
    """None for a key of another version of genrl, or of a method that is gone."""
    entries_of = next((entries for entries in known.values() if key in entries), None)
    try:
        return document(key, entries_of)
    except ValueError:
        return None


PROMPTS_PER_PAGE = 20
_SERVED = re.compile(r"samples/(step-\d+/)?[^/\\]+\.(png|wav)|videos/step-\d+/[^/\\]+\.gif")


class Picture(NamedTuple):
    """A sheet of samples."""

    name: str
    """In words: "Samples at step 20"."""
    path: Path


def pictures(run: Run) -> list[Picture]:
    """The sheets in samples/ but for before_after.png: first those without a step, then the others, newest first."""
    # Of one step the shortest name comes first: the samples before the best and the worst of them.
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
