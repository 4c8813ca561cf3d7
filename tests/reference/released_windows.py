"""Which steps the released trainers make stochastic, draw for draw.

Unlike those of `genrl.mdp.plan`, a window here may be empty, or shrink near the end of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np


def constant_hold(start: int, *, every: int) -> int:
    """`every` iterations (tau) at each start: MixGRPO's default."""
    return every


def exponential_hold(start: int, *, every: int, rate: float = 0.1, threshold: int = 13) -> int:
    """`ceil(tau exp(-k max(0, start - threshold)))`: MixGRPO's exponential decay (arXiv 2507.21802, and code)."""
    return math.ceil(every * math.exp(-rate * max(0, start - threshold)))


def start_at(starts: Sequence[int], hold: Callable[[int], int], iteration: int, *, wrap: bool) -> int:
    """The start that is in force at `iteration`, where start l stays for max(hold(l), 1) iterations."""
    lengths = [max(hold(start), 1) for start in starts]
    if wrap:
        iteration %= sum(lengths)
    for start, length in zip(starts, lengths, strict=True):
        if iteration < length:
            return start
        iteration -= length
    return starts[-1]


def linear_hold(start: int, *, longest: int, shortest: int, steps: int) -> int:
    """`max(shortest, floor(longest (1 - p) + shortest p))`, p = start / steps: MixGRPO's linear decay (code)."""
    share = start / steps
    return max(shortest, int(longest * (1.0 - share) + shortest * share))


def mixgrpo_window(
    size: int,
    last: int,
    *,
    iteration: int,
    strategy: Literal["progressive", "decay", "exp_decay", "random"],
    every: int,
    stride: int | None = None,
    wrap: bool = True,
    first: int = 0,
    seed: int = 0,
    longest: int | None = None,
    shortest: int | None = None,
    rate: float = 0.1,
    threshold: int = 13,
) -> range:
    """MixGRPO's window at an iteration (Tencent-Hunyuan/MixGRPO, grpo_states.py); `last` is the steps less 2 there.

    `range(l, min(l + size, last))` for l = first, first + stride, ... up to `last` itself: windows shrink near the end,
    and l = last is an empty one for a whole hold (`moving_window` has full ones only).
    strategy: "progressive", "decay" (from longest to shortest; None: every and max(1, every // 4)), "exp_decay" (rate,
    threshold), or "random": at `first`, then uniform, from seed + iteration - 1 (the trainer passes no seed, so its
    processes disagree). stride None = size, windows that do not overlap. wrap: back to `first` after `last`, else stay.
    Raises ValueError for another strategy.
    """
    if strategy == "random":
        drawn = np.random.default_rng(seed + iteration - 1) if iteration else None
        start = first if drawn is None else int(drawn.integers(0, last - size + 1))
        return range(start, min(start + size, last))
    if strategy == "progressive":
        hold = partial(constant_hold, every=every)
    elif strategy == "decay":
        slowest = every if longest is None else longest
        fastest = max(1, every // 4) if shortest is None else shortest
        hold = partial(linear_hold, longest=slowest, shortest=fastest, steps=last)
    elif strategy == "exp_decay":
        hold = partial(exponential_hold, every=every, rate=rate, threshold=threshold)
    else:
        raise ValueError(f"strategy must be progressive, random, decay or exp_decay, got {strategy!r}")
    step = size if stride is None else stride
    starts = [first] if step == 0 else list(range(first, last + 1, step))
    if not wrap and starts[-1] < last and step > 0:
        starts.append(last)
    start = start_at(starts, hold, iteration, wrap=wrap)
    return range(start, min(start + size, last))


def released_points(steps: int, last: int, ratio: float) -> int:
    """Levels of MixGRPO-Flash's compressed tail behind the stochastic step `last`: one more than its steps.

    With one, the picture stays at the first of them, never denoised.
    """
    return int(max((steps - last) * ratio, 1))
