"""How sure a success rate is."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054
"""Half-width of 95 % of a standard normal."""


def wilson(successes: float, trials: int, *, z: float = Z_95) -> tuple[float, float]:
    """The score interval of a success rate, `(low, high)` in [0, 1] (Wilson 1927):

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),  p = successes / n.

    The rates whose own z sqrt(p (1 - p) / n) reaches the one that was seen; sensible at 0, at 1 and for few trials.
    successes: a tie may count as half.
    Raises ValueError unless 0 <= successes <= trials and 0 < trials.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"there must be a trial, and 0 to all of them successes: got {successes} of {trials}")
    rate, square = successes / trials, z * z / trials
    centre = (rate + square / 2) / (1 + square)
    half = z * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials)) / (1 + square)
    # Exactly 0 and 1 at the ends, where the two terms cancel but for rounding.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high
