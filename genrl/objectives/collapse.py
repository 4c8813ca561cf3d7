"""Collapse: when a score has fallen, and when a series of figures has left its own history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple

FALL = 3.0
"""Standard errors of the difference from the best by which a fallen score lies below it."""
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


def has_fallen(score: Score, best: Score, tolerance: float | None = None) -> bool:
    """Whether it lies below the best by more than the tolerance, None = `FALL` standard errors of their difference. A
    missing score (NaN) has not."""
    allowed = FALL * math.hypot(score.error, best.error) if tolerance is None else tolerance
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
