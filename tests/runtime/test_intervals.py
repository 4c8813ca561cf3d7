"""Wilson's interval: known values, its defining equation, symmetry, and how often it covers the truth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genrl.runtime.intervals import Z_95, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I: method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_published_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


@given(trials=st.integers(1, 5000), share=st.floats(0, 1), z=st.floats(0.1, 4))
def test_its_ends_are_z_deviations_from_the_rate(trials: int, share: float, z: float) -> None:
    """|p - rate| = z sqrt(p (1 - p) / n) at both ends p: what a score interval is. Mirrored for failures."""
    successes = round(share * trials)
    low, high = wilson(successes, trials, z=z)
    rate = successes / trials
    assert 0 <= low <= rate <= high <= 1 and low < high
    for end in (low, high):
        assert (end - rate) ** 2 == pytest.approx(z * z * end * (1 - end) / trials, abs=1e-9)
    assert wilson(trials - successes, trials, z=z) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@pytest.mark.parametrize("trials", [10, 50, 200])
def test_it_covers_the_truth_about_95_times_in_100(trials: int) -> None:
    """Exact coverage, summed over all outcomes, of 97 rates: on average 95 %, and never below 83 % (Agresti, Coull)."""
    inside = [wilson(k, trials) for k in range(trials + 1)]
    coverage = []
    for step in range(2, 99):
        p = step / 100
        chances = [math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(trials + 1)]
        coverage.append(sum(c for c, (low, high) in zip(chances, inside, strict=True) if low <= p <= high))
    assert sum(coverage) / len(coverage) == pytest.approx(0.95, abs=0.01) and min(coverage) > 0.83


def test_no_trials_and_impossible_counts_are_refused() -> None:
    for successes, trials in ((0, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match=f"got {successes} of {trials}"):
            wilson(successes, trials)
    assert math.isclose(Z_95, 1.96, abs_tol=1e-4)
