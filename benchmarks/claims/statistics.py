"""What a handful of seeds says: intervals, paired differences, and the verdict on a claim.

The rule. The difference of a pair is taken at equal seeds and equal cost; its 95 % interval over seeds is Student's, or
where a claim names tasks a bootstrap that is stratified by them. A claim that one is higher (lower) is

- **shown** where the interval lies above (below) 0;
- **denied** where it lies on the other side of 0, or wholly within the claim's band, where differences count as none;
- **not decided** otherwise, and with fewer than two pairs.

A claim that both are the same is shown where the interval lies within the band, denied where it lies outside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, stdev

import numpy as np
from scipy.stats import t

Point = tuple[float, float]
ALMOST = 0.03
"""A curve that ends so much before a cost, as a share of it, counts as having reached it: equal runs differ by that."""


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval, of `count` seeds or pairs."""

    value: float
    low: float
    high: float
    count: int


def student(values: Sequence[float]) -> Interval:
    """Mean and Student's 95 % interval; of one value alone it is infinite."""
    if len(values) < 2:
        return Interval(mean(values), float("-inf"), float("inf"), len(values))
    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return Interval(mean(values), mean(values) - half, mean(values) + half, len(values))


def stratified(values: Sequence[Sequence[float]], samples: int = 20_000) -> Interval:
    """Mean over tasks and seeds, and its percentile interval when the seeds of each task are drawn again (rliable's
    stratified bootstrap, arXiv 2108.13264). values: of every task one per seed."""
    rng, table = np.random.default_rng(0), [np.asarray(of_task, float) for of_task in values]
    means = [of_task[rng.integers(len(of_task), size=(samples, len(of_task)))].mean(1) for of_task in table]
    low, high = np.quantile(np.mean(means, axis=0), [0.025, 0.975])
    return Interval(float(np.mean([one.mean() for one in table])), float(low), float(high), min(map(len, table)))


def paired(values: Sequence[float], base: Sequence[float]) -> Interval:
    """Of the differences at equal seeds."""
    return student([value - other for value, other in zip(values, base, strict=True)])


def verdict(difference: Interval, expected: str, band: float) -> str:
    """`shown`, `denied` or `not decided`, by the rule above."""
    if difference.count < 2:
        return "not decided"
    low, high = (difference.low, difference.high) if expected != "lower" else (-difference.high, -difference.low)
    within = -band <= low and high <= band
    if expected == "same":
        return "shown" if within else "denied" if low > band or high < -band else "not decided"
    return "shown" if low > 0 else "denied" if high < 0 or within else "not decided"


def at(curve: Sequence[Point], cost: float) -> float | None:
    """The value of a curve of (cost, value) at this cost, linear between evaluations; None where it ends before."""
    for (x, y), (x_next, y_next) in pairwise(curve):
        if x <= cost <= x_next:
            return y + (y_next - y) * (cost - x) / (x_next - x) if x_next > x else y_next
    return curve[-1][1] if curve and curve[-1][0] >= (1 - ALMOST) * cost else None


def reached(curve: Sequence[Point], level: float) -> float | None:
    """Where a curve first reaches a level, linear between evaluations, or None."""
    for (x, y), (x_next, y_next) in pairwise(curve):
        if y < level <= y_next:
            return x + (x_next - x) * (level - y) / (y_next - y)
    return None
