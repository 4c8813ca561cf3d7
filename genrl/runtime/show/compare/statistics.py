"""How sure a success rate is, and what votes say: win rates, agreement of judges, and which reward predicts people.
Pure functions, no files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

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


@dataclass(frozen=True)
class Share:
    """A share of `count` trials, with its 95 % Wilson interval; all in [0, 1]."""

    value: float
    low: float
    high: float
    count: int


def share(successes: float, count: int) -> Share | None:
    """`successes` of `count`; a tie may count as half. None where there were no trials."""
    if count == 0:
        return None
    return Share(successes / count, *wilson(successes, count), count)


def win_rate(votes: Sequence[Sequence[float]]) -> Share | None:
    """How often B is preferred: the mean over pairs of the mean of their votes (1 = B, 0 = A, 0.5 = tie).

    The trials of the interval are pairs, not votes: several judges of one pair are not independent. Ties make it wider
    than it has to be.
    """
    return share(sum(fmean(of_pair) for of_pair in votes), len(votes))


def decided(votes: Sequence[Sequence[float]]) -> list[bool]:
    """Decisions on the pairs without an overall tie: whether more of their judges preferred B."""
    means = [fmean(of_pair) for of_pair in votes]
    return [mean > 0.5 for mean in means if mean != 0.5]


def accuracy(preferred_b: Sequence[bool], advantages: Sequence[float]) -> Share | None:
    """How often a reward prefers what people prefer. advantages: the reward of B minus that of A, per pair; where it is
    0, the reward is right by half."""
    right = sum(0.5 if d == 0 else float((d > 0) == b) for b, d in zip(preferred_b, advantages, strict=True))
    return share(right, len(preferred_b))


def same_answers(units: Sequence[Sequence[Hashable]]) -> tuple[int, int]:
    """(pairs of judges who gave the same answer, all pairs of judges), over the answers that each unit was given."""
    pairs = [first == second for answers in units for first, second in combinations(answers, 2)]
    return sum(pairs), len(pairs)


def krippendorff_alpha(units: Sequence[Sequence[Hashable]]) -> float | None:
    """Agreement beyond chance of any number of judges, of whom each may have left out units: 1 - D_o / D_e, nominal
    (Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011, section C). 1 = all agree, 0 = as by chance.

    units: the answers that each was given. None where no unit has two answers, or all answers are the same.
    """
    paired = [answers for answers in units if len(answers) > 1]
    totals = Counter(answer for answers in paired for answer in answers)
    count = totals.total()
    expected = count * count - sum(n * n for n in totals.values())
    if expected == 0:
        return None
    observed = sum(
        (len(answers) ** 2 - sum(n * n for n in Counter(answers).values())) / (len(answers) - 1) for answers in paired
    )
    return 1 - (count - 1) * observed / expected
