"""The rule that ends a run whose held-out score falls."""

from __future__ import annotations

import pytest

from genrl.objectives.hacking import fallen_since

NAN = float("nan")


def test_a_fall_that_lasts_ends_the_run_at_the_best_evaluation() -> None:
    assert fallen_since([0.5, 0.7, 0.7, 0.6, 0.55], tolerance=0.05, patience=2) == 1
    assert fallen_since([0.5, 0.7, 0.6, 0.69], tolerance=0.05, patience=2) is None  # one of the two recovered
    assert fallen_since([0.5, 0.7, 0.66, 0.66], tolerance=0.05, patience=2) is None  # within the tolerance
    assert fallen_since([0.7, 0.5], tolerance=0.0, patience=2) is None  # too early to say
    assert fallen_since([0.7, 0.5], tolerance=0.0, patience=1) == 0


def test_missing_scores_are_passed_over() -> None:
    assert fallen_since([NAN, 0.7, NAN, 0.5, NAN, 0.4], tolerance=0.1, patience=2) == 1
    assert fallen_since([NAN] * 5, tolerance=0.0, patience=1) is None


def test_wrong_settings_are_refused() -> None:
    for tolerance, patience in ((-0.1, 1), (0.0, 0)):
        with pytest.raises(ValueError, match="patience at least 1"):
            fallen_since([1.0], tolerance=tolerance, patience=patience)
