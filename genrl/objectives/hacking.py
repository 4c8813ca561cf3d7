"""Reward hacking: when a held-out scorer says that training has gone too far."""

from __future__ import annotations

import math
from collections.abc import Sequence


def fallen_since(held_out: Sequence[float], *, tolerance: float, patience: int) -> int | None:
    """The evaluation to go back to, if training is to end: the best one, the first of equals; else None.

    held_out: scores of one held-out scorer (higher is better), one per evaluation, the first before training. Training
    is to end where each of the last `patience` evaluations lies more than tolerance below the best before them. A
    missing score (NaN) is neither good nor bad: it is passed over.
    Raises ValueError for a negative tolerance or no patience.
    """
    if tolerance < 0 or patience < 1:
        raise ValueError(f"tolerance must be 0 or more and patience at least 1, got {tolerance} and {patience}")
    scored = [(index, score) for index, score in enumerate(held_out) if not math.isnan(score)]
    if len(scored) <= patience:
        return None
    best_index, best = max(scored[:-patience], key=lambda pair: pair[1])
    return best_index if all(score < best - tolerance for _, score in scored[-patience:]) else None
