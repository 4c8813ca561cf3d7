"""What a column of a table can say of the runs of its row: `NAME ARGUMENTS` in benchmarks/claims.yaml.

A metric is written as it stands in the log; `eval/` is where the row's evaluation stands. `per` is what was spent:
kcalls, ksteps, ktokens or step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from benchmarks.claims import statistics, stored
from benchmarks.claims.statistics import Point
from benchmarks.claims.stored import Stored
from genrl.runtime.loop.collapse import HELD_OUT

NONE = "–"


@dataclass(frozen=True)
class Row:
    """A row: its runs by seed, what is written of it, where its evaluation stands; and
    what every row of the table has spent."""

    title: str
    note: str
    runs: Mapping[int, Stored]
    evaluation: str = "eval"
    spent: Mapping[str, float] | None = None

    def curves(self, metric: str, per: str = "step") -> list[list[Point]]:
        """Of every seed that has it, by seed."""
        return list(self.by_seed(metric, per).values())

    def by_seed(self, metric: str, per: str = "step") -> dict[int, list[Point]]:
        place, _, name = metric.partition("/")
        full = f"{self.evaluation if place == 'eval' else place}/{name}"
        curves = {seed: _any(run, full, per) for seed, run in self.runs.items()}
        return {seed: points for seed, points in curves.items() if points}

    def totals(self, key: str) -> list[float]:
        return [run[key] for run in self.runs.values() if run.get(key) is not None]


def _any(run: Stored, metric: str, per: str) -> list[Point]:
    """By what it is asked for, else by what there is: a run from before the store has one of them alone."""
    others = (per, "step", "kcalls", "ksteps", "ktokens") if per == "step" else (per,)
    return next((curve for axis in others if (curve := stored.points(run, metric, axis))), [])


def title(row: Row) -> str:
    return row.title


def note(row: Row) -> str:
    return row.note


def trained(row: Row) -> str:
    return " + ".join(next(iter(row.runs.values())).get("trained", [])) or NONE


def change(row: Row, metric: str, style: str = "each") -> str:
    """`start → end ± sd (each seed)`; `brief`: without the seeds; `plain`: the means alone."""
    curves = [points for points in row.curves(metric) if len(points) > 1]
    if not curves or len(curves) < len(row.curves(metric)):
        return NONE
    return start_to_end([(points[0][1], points[-1][1]) for points in curves], style)


def logged(row: Row) -> str:
    """The scorers that were only watched."""
    names = next(iter(row.runs.values())).get("logged", [])
    return "<br>".join(f"{name} {change(row, f'eval/{name}_mean')}" for name in names) or NONE


def diversity(row: Row) -> str:
    return start_to_end(row.totals("diversity"))  # type: ignore[arg-type]


def start_to_end(pairs: Sequence[Sequence[float]], style: str = "each") -> str:
    if not pairs:
        return NONE
    start, ends = mean(pair[0] for pair in pairs), [pair[1] for pair in pairs]
    if len(ends) == 1 or style == "plain":
        return f"{start:.3f} → {mean(ends):.3f}"
    each = f" ({', '.join(f'{value:.3f}' for value in ends)})" if style == "each" else ""
    return f"{start:.3f} → **{mean(ends):.3f}** ± {stdev(ends):.3f}{each}"


def start(row: Row, metric: str) -> str:
    curves = row.curves(metric)
    return f"{mean(points[0][1] for points in curves):.3f}" if curves else NONE


def end(row: Row, metric: str) -> str:
    return spread([points[-1][1] for points in row.curves(metric)])


def ends(row: Row, metric: str) -> str:
    """The mean of the ends and each, without the start."""
    last = [points[-1][1] for points in row.curves(metric)]
    return f"**{mean(last):.3f}** ({', '.join(f'{value:.3f}' for value in last)})" if last else NONE


def points(row: Row, metric: str) -> str:
    """Means at every evaluation, the last with the standard deviation."""
    curves = row.curves(metric)
    if not curves:
        return NONE
    along = [mean(column) for column in zip(*([y for _, y in curve] for curve in curves), strict=False)]
    last = [curve[-1][1] for curve in curves]
    text = " → ".join(f"{value:.3f}" for value in along)
    return text + (f" ± {stdev(last):.3f}" if len(last) > 1 else "")


def at(row: Row, metric: str, per: str, cost: str, style: str = "") -> str:
    """The mean after a cost, with the standard deviation; `bold` for the column that is compared."""
    curves = row.curves(metric, per)
    values = [value for curve in curves if (value := statistics.at(curve, float(cost))) is not None]
    if not values or len(values) < len(curves):
        return NONE
    text = spread(values)
    return "**{}**{}{}".format(*text.partition(" ")) if style == "bold" else text


def spread(values: Sequence[float]) -> str:
    if not values:
        return NONE
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def reached(row: Row, metric: str, per: str, level: str, unit: str = "") -> str:
    """What each seed had spent when it first reached a level; 0 where it began there."""
    texts = []
    for curve in row.curves(metric, per):
        cost = 0.0 if curve[0][1] >= float(level) else statistics.reached(curve, float(level))
        texts.append("never" if cost is None else f"{cost:.0f}{unit}")
    return ", ".join(texts) or NONE


def fall(row: Row, metric: str) -> str:
    """Best minus last, each seed."""
    return ", ".join(f"{max(y for _, y in c) - c[-1][1]:.3f}" for c in row.curves(metric)) or NONE


def held_out(row: Row) -> str:
    """`points` of the figure by which the run judges itself."""
    return next((text for name in HELD_OUT if (text := points(row, f"{name}_mean")) != NONE), NONE)


def noticed(row: Row) -> str:
    """What each seed said of a collapse: at which iteration, and of what; `back 40` where it went back to 40."""
    kept = [run["noticed"] for run in row.runs.values() if "noticed" in run]
    texts = [", ".join(f"{step:.0f}: {_of(name, value)}" for step, name, value in rows) or "nothing" for rows in kept]
    return "<br>".join(texts) or NONE


def _of(name: str, value: float) -> str:
    return f"{name} {value:.0f}" if name in ("back", "stopped") else name


def equal(row: Row, metric: str, per: str) -> str:
    """Start and the value at what all rows have spent, with each seed."""
    curves, cost = row.curves(metric, per), (row.spent or {})[per]
    values = [value for curve in curves if (value := statistics.at(curve, cost)) is not None]
    if not values or len(values) < len(curves):
        return NONE
    each = ", ".join(f"{value:.3f}" for value in values)
    return f"{mean(points[0][1] for points in curves):.3f} → **{mean(values):.3f}** ({each})"


def budget(row: Row, per: str) -> str:
    """What all rows have spent, at which they are compared."""
    return f"{(row.spent or {})[per]:.0f}"


def interval(difference: statistics.Interval) -> str:
    if difference.count < 2:
        return f"{difference.value:+.3f} (one pair)"
    return f"{difference.value:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})"


def part(row: Row, metric: str, place: str, digits: str = "3") -> str:
    """Of a metric of training its `first` row, or the mean of the first ten (`begin`), of `all`, or of the last ten
    (`last`)."""
    number = ("first", "begin", "all", "last").index(place)
    known = [run["means"][metric][number] for run in row.runs.values() if metric in run.get("means", {})]
    values = [value for value in known if value is not None]
    if not values:
        return NONE
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 and digits == "3" else "")


def total(row: Row, key: str, scale: str = "1", digits: str = "0", unit: str = "") -> str:
    """The mean of what is known of a figure of the whole run."""
    known = row.totals(key)
    return f"{mean(known) / float(scale):.{digits}f}{unit}" if known else NONE


def iterations(row: Row) -> str:
    numbers = sorted({round(value) for value in row.totals("iterations")})
    return "–".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))) if numbers else NONE


def calls(row: Row) -> str:
    parts = [total(row, f"{kind}_calls", "1000", "1", "k") for kind in ("sampling", "training")]
    return " + ".join(parts)


def spent(row: Row, per: str, unit: str = "") -> str:
    """The mean of what had been spent at the last evaluation."""
    last = [run["curve"][per][-1] for run in row.runs.values() if per in run["curve"]]
    return f"{mean(last):.0f}{unit}" if last else NONE


def seeds(row: Row) -> str:
    return str(len(row.runs))


Cell = Callable[..., str]
_ALL = (title, note, trained, change, logged, diversity, start, end, ends, points, at, reached, fall, equal, budget)
CELLS: dict[str, Cell] = {
    cell.__name__: cell for cell in (*_ALL, held_out, noticed, part, total, iterations, calls, spent, seeds)
}
