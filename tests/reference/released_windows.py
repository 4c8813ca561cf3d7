"""MixGRPO-Flash's compressed tail in the released trainer."""

from __future__ import annotations


def released_points(steps: int, last: int, ratio: float) -> int:
    """Levels of MixGRPO-Flash's compressed tail behind the stochastic step `last`: one more than its steps.

    With one, the picture stays at the first of them, never denoised.
    """
    return int(max((steps - last) * ratio, 1))
