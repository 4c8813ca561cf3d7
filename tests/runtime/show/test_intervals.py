"""Wilson's interval: known values, its defining equation, symmetry."""

from __future__ import annotations

import math

import pytest

from genrl.runtime.show.intervals import Z_95, wilson


def test_published_values_and_impossible_counts() -> None:
    """Newcombe 1998, table I: method 3."""
    for counts, wanted in {(81, 263): (0.2553, 0.3662), (0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}.items():
        assert wilson(*counts) == pytest.approx(wanted, abs=5e-5)
    for successes, trials in ((0, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match=f"got {successes} of {trials}"):
            wilson(successes, trials)
    assert math.isclose(Z_95, 1.96, abs_tol=1e-4)
