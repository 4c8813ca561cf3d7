"""What a run is doing, how fast, and whether its held-out rewards say that it exploits the one it is trained on.

A run folder as it grows: metrics by key, read on from where the last look ended, with their configuration.

A run of 20,000 rows is read once, in about a second; a look at it afterwards costs what was written since.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from genrl.config.errors import command
from genrl.config.yaml_source import MAX_BYTES, read
from genrl.runtime.folder.run import Run, read_row, run_info
from genrl.runtime.loop import collapse
from genrl.runtime.loop.progress import duration
from genrl.runtime.loop.signals import read_heartbeat
from genrl.runtime.show.curves import Point, is_constant


@dataclass
class Column:
    """All values of one metric by rising step; NaN where a row has it without a value."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    missing: int = 0
    low: float = math.inf
    high: float = -math.inf

    def add(self, step: int, value: object) -> None:
        number = float(value) if isinstance(value, (int, float)) else math.nan
        number = number if math.isfinite(number) else math.nan
        self.steps.append(step)
        self.values.append(number)
        if math.isnan(number):
            self.missing += 1
        else:
            self.low, self.high = min(self.low, number), max(self.high, number)

    def points(self) -> list[Point]:
        """For `curves.chart`."""
        return [(s, None if math.isnan(v) else v) for s, v in zip(self.steps, self.values, strict=True)]

    def known(self) -> list[tuple[int, float]]:
        """(step, value) of the rows with a value."""
        return [(s, v) for s, v in zip(self.steps, self.values, strict=True) if not math.isnan(v)]

    @property
    def last(self) -> float | None:
        """The newest value; None where there is none."""
        return next((value for value in reversed(self.values) if not math.isnan(value)), None)

    @property
    def is_constant(self) -> bool:
        """Equal everywhere, up to rounding, and never without a value."""
        return not self.missing and is_constant([self.low, self.high])


class Followed:
    """One run, or the folder in which one will begin."""

    def __init__(self, folder: Path, name: str = "") -> None:
        """name: shown for it; default the folder's."""
        self.run, self.name = Run(folder), name or folder.resolve().name
        self.config = ""
        self.settings: Mapping[str, Any] = {}
        self.info: Mapping[str, Any] = {}
        self.problem = ""
        """What of the folder cannot be read, for the reader; empty where all can."""
        self._forget()

    def _forget(self) -> None:
        self.columns: dict[str, Column] = {}
        self.rows = 0
        self.done = 0
        """Finished iterations, of the last row."""
        self._file, self._offset = 0, 0

    @property
    def exists(self) -> bool:
        return self.run.config.is_file() or self.run.metrics.is_file()

    @property
    def planned(self) -> int | None:
        """Iterations of the whole run; None where the configuration does not tell."""
        iterations = self.settings.get("iterations")
        return iterations if isinstance(iterations, int) else None

    def look(self) -> None:
        """Read what was written since the last look. What cannot be read is told by `problem`."""
        self.problem = ""
        self.read_info()
        try:
            self.read_config()
            self._read_on()
        except (OSError, ValueError) as error:
            self.problem = str(error)

    def read_info(self) -> None:
        """What run.json tells; nothing where it cannot be read."""
        self.info = run_info(self.run)

    def read_config(self) -> None:
        """Raises ValueError where config.yaml is no YAML, or larger than a configuration can be."""
        text = ""
        if self.run.config.is_file():
            with self.run.config.open(encoding="utf-8") as file:
                text = file.read(MAX_BYTES + 1)
        if text != self.config:
            values = read(self.run.config).value if text else {}
            self.config, self.settings = text, values if isinstance(values, dict) else {}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of metrics.jsonl, in its order."""
        for row in rows:
            self.rows, self.done = self.rows + 1, row["step"]
            for key, value in row.items():
                if key != "step":
                    self.columns.setdefault(key, Column()).add(row["step"], value)

    def _read_on(self) -> None:
        """The complete lines after the last ones read; all of them where a resumed run has written the file anew."""
        path = self.run.metrics
        if not path.is_file():
            return self._forget()
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._file or stat.st_size < self._offset:
                self._forget()
                self._file = stat.st_ino
            file.seek(self._offset)
            for line in file:
                # Written by half; the next look reads it whole.
                if not line.endswith(b"\n"):
                    break
                self.add([read_row(line, path, self.rows + 1)])
                self._offset += len(line)


LOADING_S = 300
"""How long after its start a run without a heartbeat may still be loading its model."""
QUIET_S = 60
"""From which time without progress on it is shown."""
RECENT = 50
"""Iterations over which the rate is taken."""
COSTS = ("timing/iteration_s", "timing/eval_s", "timing/checkpoint_s")


class State(NamedTuple):
    word: str
    """waiting, starting, running, finished, stopped or hung."""
    note: str
    """More about it, for the reader; may be empty."""


class Pace(NamedTuple):
    seconds: float
    """Per iteration, evaluations and saves included, over the last 50."""
    left: float | None
    """Seconds to the end, while iterations are left and their number is known."""


def state_of(run: Followed, now: float | None = None) -> State:
    """State of a run as its files tell. now: seconds since 1970, for tests.

    A run tells that it goes on by heartbeat/rank-*.json, which it removes when it ends by itself. So what is left by a
    process that is gone was killed, and one that is there without progress for `distributed.timeout_s` hangs.
    """
    if not run.exists:
        return State("waiting", f"{run.run.folder} is not there yet")
    if ended := over(run):
        return State("finished", ended if run.planned is None or run.done < run.planned else "")
    paths = sorted((run.run.folder / "heartbeat").glob("rank-*.json"))
    beats = [beat for path in paths if (beat := read_heartbeat(path)) is not None]
    resume = f"to go on: {command('resume', run.run.folder)}"
    if not beats:
        return _without_heartbeat(run, time.time() if now is None else now, resume)
    last = max(beats, key=lambda beat: beat.time)
    where = f"{last.phase}, iteration {max(last.step, run.done) + 1}"
    silent = (time.time() if now is None else now) - last.time
    if any(beat.ended for beat in beats):
        return State("hung", f"ended by its watchdog in {where}; stacks are in {run.run.dumps}; {resume}")
    if any(beat.was_killed for beat in beats):
        return State("stopped", f"killed in {where}; {resume}")
    distributed = run.settings.get("distributed")
    limit = distributed.get("timeout_s", 600.0) if isinstance(distributed, dict) else 600.0
    quiet = f", no progress for {duration(silent)}" if silent > QUIET_S else ""
    return State("hung" if silent > limit else "running", where + quiet)


def over(run: Followed) -> str:
    """Why nothing is left to do; empty while there is."""
    if run.planned is not None and run.done >= run.planned:
        return "all iterations are done"
    stopped = run.columns.get(f"{collapse.KEY}/stopped")
    at = None if stopped is None else stopped.last
    return "" if at is None else f"it collapsed, and was stopped: the best evaluation was that of step {at:g}"


def pace(run: Followed) -> Pace | None:
    """None before the first iteration is done."""
    iterations = run.columns.get(COSTS[0])
    if iterations is None or not run.done:
        return None
    since = run.done - min(RECENT, len(iterations.steps))
    seconds = spent(run.columns, since) / (run.done - since)
    left = None if run.planned is None or over(run) else seconds * (run.planned - run.done)
    return Pace(seconds, left)


def spent(columns: Mapping[str, Column], since: int = -1) -> float:
    """Seconds of iterations, evaluations and saves after step `since` together."""
    return math.fsum(
        value for key in COSTS if key in columns for step, value in columns[key].known() if step > since
    )  # fmt: skip


def warnings(run: Followed) -> Iterator[str]:
    """What a person should look at: what cannot be read, what was noticed of a collapse, rewards that fall while
    the total rises, iterations without scores."""
    if run.problem:
        yield run.problem
    yield from collapse.warnings(run.columns)
    yield from _opposed(run.columns)
    total = run.columns.get("reward/total_mean")
    if total is not None and math.isnan(total.values[-1]):
        yield f"iteration {total.steps[-1]} taught nothing: no sample had a score"


def _opposed(columns: Mapping[str, Column]) -> Iterator[str]:
    """Held-out rewards whose last two evaluations both lie a tenth of their standard deviation or more below the first,
    while the total rose. A reason to look at the pictures, not a proof."""
    total = columns["eval/total_mean"].known() if "eval/total_mean" in columns else []
    if len(total) < 3 or total[-1][1] <= total[0][1]:
        return
    for key, column in sorted(columns.items()):
        points, spread = column.known(), columns.get(key.removesuffix("_mean") + "_std")
        if not key.startswith("eval/") or not key.endswith("_mean") or spread is None or len(points) < 3:
            continue
        first, widths = points[0][1], spread.known()
        if widths and all(value < first - widths[0][1] / 10 for _, value in points[-2:]):
            name = key.removeprefix("eval/").removesuffix("_mean")
            yield (
                f"{name} fell from {first:.4g} to {points[-1][1]:.4g} while the total rose: look at the pictures for "
                "reward hacking. evaluation.monitor can end a run where a held-out reward falls"
            )


def _without_heartbeat(run: Followed, now: float, resume: str) -> State:
    """A run that has just begun loads its model, without a heartbeat yet."""
    begun = _written(run.run.info)
    if begun > _written(run.run.metrics) and now - begun < LOADING_S:
        return State("starting", "loading the model")
    return State("stopped", resume if run.config else "")


def _written(path: Any) -> float:
    """When, in seconds since 1970; 0 for a file that is not there."""
    try:
        return float(path.stat().st_mtime)
    except OSError:
        return 0.0
