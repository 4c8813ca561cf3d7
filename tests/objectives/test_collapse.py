"""The rules of collapse: what is better, what has fallen, what has left its own history."""

from __future__ import annotations

import math

import pytest

from genrl.runtime.loop.collapse import Score, has_fallen, has_left, is_better


def test_no_better_than_noise_does_not_count() -> None:
    best = Score(0.5, 0.03)
    assert not is_better(Score(0.54, 0.04), best)  # one standard error of the difference is 0.05
    assert is_better(Score(0.56, 0.04), best)
    assert is_better(Score(0.5001), Score(0.5)) and not is_better(Score(0.5), Score(0.5))
    assert not is_better(Score(math.nan), Score(0.5))


def test_fallen_is_three_standard_errors_of_the_difference_or_the_tolerance() -> None:
    best = Score(0.5, 0.03)
    assert not has_fallen(Score(0.36, 0.04), best) and has_fallen(Score(0.34, 0.04), best)
    assert has_fallen(Score(0.44, 0.04), best, tolerance=0.05) and not has_fallen(Score(0.46, 0.04), best, 0.05)
    assert not has_fallen(Score(math.nan), best)


NOISE = [1 + 0.2 * math.sin(7.0 * i) for i in range(100)]


@pytest.mark.parametrize(
    ("series", "left"),
    [
        (NOISE, False),
        ([*NOISE[:99], 100.0], False),  # one figure may be anything
        ([*NOISE[:50], *(4 * x for x in NOISE[50:])], True),
        ([x * (1 + i / 100) for i, x in enumerate(NOISE)], False),  # twice as large at the end
        ([i / 100 for i in range(100)], False),  # a distance that grows steadily
        ([math.exp(i / 15) for i in range(100)], True),
        ([1.0] * 98 + [1.2] * 2, False),
        ([5.0] * 30, False),  # too short to be a history
        ([1e-9 * x for x in NOISE], False),
    ],
)
def test_leaving_its_own_history(series: list[float], left: bool) -> None:
    assert has_left(series, series[-10:]) == left
