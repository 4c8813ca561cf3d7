"""Windows of steps that move with the iteration, and laws of their place. No torch.

A window is a range of denoising steps inside [low, high), the same on every process, and never empty. Windows that
are sampled (`schedules.window_steps`, `schedules.geometric_window`) need torch's generators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def moving_window(
    size: int,
    low: int,
    high: int,
    *,
    iteration: int,
    every: int,
    stride: int = 1,
) -> range:
    """`size` steps inside [low, high) that move down the schedule: MixGRPO's windows (arXiv 2507.21802, section 3).

    Starts are low, low + stride, ... and, last, high - size, where it stays for good; each is in force for `every`
    iterations (tau).
    A pure function of its arguments, for any iteration >= 0. Raises ValueError where the window does not fit.
    """
    check_window(size, low, high)
    start = min(low + stride * (iteration // every), high - size)
    return range(start, start + size)


def geometric_start_probabilities(starts: int, ratio: float) -> list[float]:
    """`(1 - r) r^i / (1 - r^n)`, i = 0 .. n - 1: TreeGRPO's law of the window's start (arXiv 2512.08153); r = .5 there.

    Smaller r favours early starts; r = 1 is uniform. Raises ValueError unless 0 < r <= 1 and n >= 1.
    """
    if starts < 1 or not 0 < ratio <= 1:
        raise ValueError(f"the law needs at least one start and a ratio above 0 and up to 1, got {starts} and {ratio}")
    weights = [ratio**i for i in range(starts)]
    return [weight / math.fsum(weights) for weight in weights]


def draw_start(probabilities: Sequence[float], uniform: float) -> int:
    """The first index whose cumulative probability is above `uniform` in [0, 1): inverse-CDF sampling."""
    total = 0.0
    for index, probability in enumerate(probabilities):
        total += probability
        if uniform < total:
            return index
    return len(probabilities) - 1


def backward_interval(steps: int, *, shortest: int, longest: int, stages: int, stage: int) -> range:
    """The final steps that are branched and trained at a stage: B2-DiffuRL's backward progressive training.

    `s = shortest + floor(stage (longest - shortest + 1) / stages)` (arXiv 2503.11240 and its code; 14 to 20 of 20 steps
    over 100 stages): the interval grows from the picture's end backwards. After the last stage it stays the longest.
    Raises ValueError unless 1 <= shortest <= longest <= steps.
    """
    if not 1 <= shortest <= longest <= steps or stages < 1 or stage < 0:
        raise ValueError(
            f"window: an interval that grows from {shortest} to {longest} of {steps} steps over {stages} stages is "
            f"impossible (stage {stage}): it needs 1 <= shortest <= longest <= steps"
        )
    length = min(longest, shortest + stage * (longest - shortest + 1) // stages)
    return range(steps - length, steps)


def growing_noise(base: float, growth: float, depths: int) -> tuple[float, ...]:
    """`g_j = base (1 + growth j / (d - 1))`, j = 0 .. d - 1: the noise levels of a window tree of d branching steps.

    Dynamic-TreeRPO (arXiv 2509.23352) lets the noise grow linearly with the normalised depth; this formula is
    inferred from its abstract and reviews, as the full text was not available.
    """
    return tuple(base * (1.0 + growth * (j / (depths - 1) if depths > 1 else 0.0)) for j in range(depths))


def check_window(size: int, low: int, high: int) -> None:
    if low < 0 or size < 1 or size > high - low:
        raise ValueError(f"window: {size} steps do not fit between {low} and {high}; use fewer, or another low or high")
