"""Collapse of a run, whatever its kind: its best is remembered, and what falls or leaves its history is said.

    evaluation: {on_collapse: back, monitor: {reward: clipscore, tolerance: 0.01}}

Two things are watched. The held-out figure (that of a second scorer where there is a monitor; without evaluation the
trained reward's running mean) falls where it lies below its best for some evaluations in a row: `on_collapse` acts on
it. Loss, gradient norm and KL leave their own history: that is said, and one low evaluation is then enough. All of it
is in the loop's memory, and so in every checkpoint; all processes have the same figures, and decide alike. What was
noticed is logged as `collapse/<figure>`, which is what the live page and the report read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median, quantiles, stdev
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from genrl.runtime.loop.state import State


KEY = "collapse"
"""In the loop's memory, and the first part of the names of what is logged."""
IDLE = "idle"
"""In the loop's memory: iterations in a row, up to now, that changed no weight."""
HELD_OUT = ("eval/total", "eval/success", "eval/accuracy", "eval/loss")
"""What may judge a run, the first that an evaluation has."""
TRAINED = ("reward/total", "rollout/success")
"""The same without an evaluation."""
SHORT = {name: name.partition("/")[2] for name in (*HELD_OUT, *TRAINED)} | {"eval/loss": "held_out_loss"}
"""What a figure is called where it has fallen; that of a monitor by its reward's name."""
HISTORIES = ("loss", "grad_norm", "grad_norm/policy", "kl")
PATIENCE = 2
"""Fallen evaluations in a row, for a figure without a monitor."""
RECENT = 10
"""Iterations of a running mean, and of the figures that are compared with their history."""
MOST = 128
"""Figures of a history that are kept: twice as many are thinned to these, so that a long run costs no more."""
BOUND = (
    "a lower optimizer.lr, or one that falls; a bound on how far an update goes (kl_weight, old_policy_decay, "
    "clip_range, fewer updates_per_iteration)"
)
HELP = {
    "monitor": f"reward hacking, perhaps: look at samples; add the scorer to the rewards, or {BOUND}",
    "score": f"it helps: {BOUND}; or fewer iterations",
    "history": f"it comes before a collapse: {BOUND}",
}


def figure_of(row: Mapping[str, float], names: Sequence[str] = HELD_OUT) -> tuple[str, Score] | None:
    """The first of these figures that the row has, higher is better, and its standard error: logged as `_se`, or that
    of a share by its 95 % interval."""
    for name in names:
        key = name if name in row else f"{name}_mean"
        if row.get(key) is None:
            continue
        if f"{name}_se" in row:
            error = row[f"{name}_se"]
        else:
            error = (row.get(f"{name}_high", 0.0) - row.get(f"{name}_low", 0.0)) / (2 * 1.96)
        return name, Score(-row[key] if name.endswith("loss") else row[key], error)
    return None


def resume(loop: State) -> None:
    """Before the first iteration of this process: the rate is that after all the times the run has gone back."""
    loop.optimization.slowed = _state(loop)["rate"]


def note(loop: State, row: Mapping[str, float]) -> dict[str, float]:
    """Remember the figures of an iteration that ends; returns what to log of it."""
    state, logged = _state(loop), {}
    histories, outside = dict(state["histories"]), list(state["outside"])
    for name in (*HISTORIES, *(f"{name}_mean" for name in TRAINED), *TRAINED):
        value = row.get(name)
        if value is None or not math.isfinite(value):
            continue
        # A loss may have either sign, and only its size tells of a collapse.
        history = histories[name] = _longer(histories.get(name), abs(value) if name == "loss" else value)
        if name not in HISTORIES:
            continue
        left = has_left(history["values"], history["newest"])
        if left and name not in outside:
            logged[f"{KEY}/{name}"] = value
        outside = [figure for figure in outside if figure != name] + [name] * left
    loop.memory[KEY] = state | {"histories": histories, "outside": outside}
    _say(loop, logged)
    evaluated = any(name.startswith("eval/") for name in state["figures"])
    # At checkpoints alone: going back needs one of that moment.
    judged = not evaluated and loop.iteration % loop.config.checkpoint.every == 0
    fallen = _without_evaluation(loop, histories) if judged else {}
    return logged | fallen | _acted(loop, fallen)


def watch(loop: State, row: Mapping[str, float]) -> dict[str, float]:
    """Judge the run by an evaluation; returns what to log of it."""
    monitor = loop.config.evaluation.monitor
    watched = figure_of(row, HELD_OUT if monitor is None else [f"eval/{monitor.reward}"])
    if watched is None:
        return {}
    figures = _judged(loop, *watched, None if monitor is None else monitor.tolerance)
    return figures | _acted(loop, figures)


def best(loop: State) -> int | None:
    """The iteration of the best evaluation, by the monitor where there is one; None before the first."""
    return cast("int | None", _state(loop)["best"])


def is_idle(loop: State) -> bool:
    """Whether the run has changed no weight for as long as `idle_iterations` bears: it ends, or goes back."""
    most = loop.config.idle_iterations
    return most is not None and loop.memory.get(IDLE, 0) >= most


def forget_histories(loop: State) -> None:
    """Another method begins, whose loss is another one."""
    loop.memory[KEY] = _state(loop) | {"histories": {}, "outside": []}


def to_be_saved(loop: State) -> bool:
    """Whether this moment is the best so far, of which a checkpoint is kept. Of the model before training only where
    the run may go back to it: everybody has it."""
    return best(loop) == loop.iteration and (loop.iteration > 0 or loop.config.evaluation.on_collapse == "back")


def best_score(loop: State) -> float:
    """What the best evaluation gave, as it is logged."""
    state = _state(loop)
    best = float(state["figures"][state["judge"]]["best"][1])
    return -best if state["judge"].endswith("loss") else best


def ended(loop: State) -> bool:
    """Whether the run was stopped because it collapsed."""
    return bool(_state(loop)["ended"])


def described(key: str, value: float, step: int) -> str:
    """What the console and the pages say of a logged `collapse/<figure>`."""
    name = key.removeprefix(f"{KEY}/")
    if name == "back":
        return f"collapse: after iteration {step} the run went back to iteration {value:g}, with half the learning rate"
    if name == "stopped":
        return f"collapse: the run was stopped after iteration {step}; its best is that of iteration {value:g}"
    if name in HISTORIES:
        return f"collapse: {name} ({value:.3g}) left its own history at iteration {step}; {HELP['history']}"
    help_ = HELP["score" if name in SHORT.values() else "monitor"]
    return f"collapse: {name} lies {value:.3g} below its best at iteration {step}; {help_}"


def _state(loop: State) -> dict[str, Any]:
    none_yet: dict[str, Any] = {"best": None, "judge": None, "figures": {}, "histories": {}, "outside": []}
    return loop.memory.get(KEY) or none_yet | {"rate": 1.0, "ended": False}


def _longer(history: Mapping[str, Any] | None, value: float) -> dict[str, Any]:
    """The history with one more figure; a new object, since the old one may be put back (`undo`)."""
    old = history or {"every": 1, "count": 0, "values": [], "newest": []}
    every, count = old["every"], old["count"]
    values = [*old["values"], value] if count % every == 0 else old["values"]
    if len(values) >= 2 * MOST:
        every, values = 2 * every, values[::2]
    return {"every": every, "count": count + 1, "values": values, "newest": [*old["newest"], value][-RECENT:]}


def _without_evaluation(loop: State, histories: Mapping[str, Any]) -> dict[str, float]:
    """The trained reward's running mean takes the place of an evaluation that a run does not make."""
    for name in TRAINED:
        history = histories.get(f"{name}_mean") or histories.get(name)
        if history is not None and len(history["newest"]) == RECENT:
            newest = history["newest"]
            score = Score(fmean(newest), stdev(newest) / math.sqrt(RECENT))
            return _judged(loop, name, score, None)
    return {}


def _judged(loop: State, name: str, score: Score, tolerance: float | None) -> dict[str, float]:
    """Compare a figure with its best, which it may become; what to log of it."""
    state = _state(loop)
    before = state["figures"].get(name)
    if math.isnan(score.mean):
        return {}
    step, low = loop.iteration, 0
    top = Score(*before["best"][1:]) if before else score
    if before is None or is_better(score, top):
        before, top = {"best": [step, *score]}, score
    elif (state["outside"] or is_idle(loop)) and has_fallen(score, top, tolerance, BESIDE):
        low = PATIENCE
    elif has_fallen(score, top, tolerance):
        low = before["low"] + 1
    figures = state["figures"] | {name: {"best": before["best"], "low": low}}
    loop.memory[KEY] = state | {"figures": figures, "best": before["best"][0], "judge": name}
    row = {"eval/below_best": top.mean - score.mean} if name.startswith("eval/") else {}
    if low >= PATIENCE > before["low"]:  # said once: again only after it has recovered
        key = f"{KEY}/{SHORT.get(name) or name.partition('/')[2]}"
        row[key] = top.mean - score.mean
        _say(loop, {key: row[key]})
    return row


def _acted(loop: State, figures: Mapping[str, float]) -> dict[str, float]:
    """Do what `on_collapse` says about what was noticed, if anything was; what to log of it."""
    action, to = loop.config.evaluation.on_collapse, best(loop)
    if not any(key.startswith(f"{KEY}/") for key in figures) or action == "warn" or to is None or to == loop.iteration:
        return {}
    if action == "back":
        _go_back(loop, to)
    else:
        loop.memory[KEY] = _state(loop) | {"ended": True}
    done = {f"{KEY}/{'back' if action == 'back' else 'stopped'}": float(to)}
    _say(loop, done)
    return done


def _say(loop: State, figures: Mapping[str, float]) -> None:
    for key, value in figures.items() if loop.is_main else ():
        loop.process.progress.say(described(key, value, loop.iteration))


def _go_back(loop: State, step: int) -> None:
    """The model, its optimiser and what is kept beside it are those of the best; the iterations, their prompts and the
    schedule go on. Figures are watched anew, from the histories of then."""
    from genrl.runtime.loop import state  # here, for the pages use this module, and do without torch

    then, now = state.go_back(loop, step)[KEY], _state(loop)
    # Halved each time: from the same weights with the same rate it would come to the same end.
    rate, histories = now["rate"] / 2, then["histories"]
    figures = {name: figure | {"low": 0} for name, figure in now["figures"].items()}
    loop.memory[KEY] = now | {"figures": figures, "histories": histories, "outside": [], "rate": rate}
    loop.memory.pop(IDLE, None)
    loop.optimization.slowed = rate


def warnings(columns: Mapping[str, Any]) -> Iterator[str]:
    """What the log says of collapses, for the pages: of each kind the newest. columns: of metrics, by key."""
    for key, column in sorted(columns.items()):
        if key.startswith(f"{KEY}/") and (points := column.known()):
            step, value = points[-1]
            yield described(key, value, step)


# Collapse: when a score has fallen, and when a series of figures has left its own history.

FALL = 3.0
"""Standard errors of the difference from the best by which a fallen score lies below it."""
BESIDE = 2.0
"""The same, once, while another figure is outside its history. Alone that means little (a policy that sharpens has
larger gradients), and so does one low evaluation; the two together came before the collapses that were seen."""
LEAST = 20
"""Figures that are a history."""
WIDTHS = 2.0
"""Widths of the history (its 5th to its 95th percentile) that the median lies above it."""


class Score(NamedTuple):
    """A mean and its standard error; one that was measured without an error is taken as exact, 0."""

    mean: float
    error: float = 0.0


def is_better(score: Score, best: Score) -> bool:
    """Whether it is better than the best by more than noise: one standard error of their difference."""
    return score.mean - best.mean > math.hypot(score.error, best.error)


def has_fallen(score: Score, best: Score, tolerance: float | None = None, errors: float = FALL) -> bool:
    """Whether it lies below the best by more than the tolerance, None = so many standard errors of their difference. A
    missing score (NaN) has not."""
    allowed = errors * math.hypot(score.error, best.error) if tolerance is None else tolerance
    return best.mean - score.mean > allowed


def has_left(series: Sequence[float], newest: Sequence[float]) -> bool:
    """Whether the newest figures lie far above the first half of the series they end.

    series: by time, all of the run or every n-th. Its first half is a history that a slow collapse cannot draw after
    itself, and that a steady rise stays near: at the end it lies one width above.
    """
    history = series[: len(series) // 2]
    if len(history) < LEAST:
        return False
    parts = quantiles(history, n=20)
    low, high = parts[0], parts[-1]
    # Figures that hardly vary are not to be left by rounding, nor by a change that is small beside them.
    width = max(high - low, abs(median(history)) / 2, 1e-6)
    return median(newest) > high + WIDTHS * width
