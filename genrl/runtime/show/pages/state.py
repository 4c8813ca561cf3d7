"""What a run is doing, how fast, and whether its held-out rewards say that it exploits the one it is trained on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from genrl.runtime.loop import collapse
from genrl.runtime.loop.progress import duration
from genrl.runtime.loop.signals import read_heartbeat
from genrl.runtime.show.pages.followed import Column, Followed

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
    resume = f"to go on: genrl resume {run.run.folder}"
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
