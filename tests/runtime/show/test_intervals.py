"""Wilson's interval: known values, its defining equation, symmetry."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genrl.runtime.show.intervals import Z_95, wilson


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


def test_published_values_and_impossible_counts() -> None:
    """Newcombe 1998, table I: method 3."""
    for counts, wanted in {(81, 263): (0.2553, 0.3662), (0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}.items():
        assert wilson(*counts) == pytest.approx(wanted, abs=5e-5)
    for successes, trials in ((0, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match=f"got {successes} of {trials}"):
            wilson(successes, trials)
    assert math.isclose(Z_95, 1.96, abs_tol=1e-4)
