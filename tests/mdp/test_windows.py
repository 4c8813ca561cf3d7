"""Windows that move, and the laws of those that are drawn: full at every iteration, where they should be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genrl.mdp import windows


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 12), st.integers(1, 5), st.integers(0, 200))
def test_a_moving_window_is_always_full(size: int, low: int, extra: int, every: int, iteration: int) -> None:
    high = low + size + extra
    window = windows.moving_window(size, low, high, iteration=iteration, every=every)
    assert len(window) == size and low <= window[0] and window[-1] < high
    if iteration:
        before = windows.moving_window(size, low, high, iteration=iteration - 1, every=every).start
        assert 0 <= window.start - before <= 1


def test_a_moving_window_reaches_every_step_and_stays_as_long_as_told() -> None:
    starts = [windows.moving_window(4, 0, 8, iteration=i, every=3).start for i in range(40)]
    assert starts[:15] == [start for start in range(5) for _ in range(3)] and set(starts[12:]) == {4}


def test_a_ratio_of_1_makes_all_starts_alike() -> None:
    assert windows.geometric_start_probabilities(4, 1.0) == [0.25] * 4
    assert windows.draw_start([0.25] * 4, 1.0 - 1e-17) == 3
    for starts, ratio in ((0, 0.5), (3, 0.0), (3, 1.1)):
        with pytest.raises(ValueError, match="at least one start"):
            windows.geometric_start_probabilities(starts, ratio)


def test_the_backward_interval_grows_to_the_longest_and_stays() -> None:
    intervals = [windows.backward_interval(20, shortest=14, longest=18, stages=10, stage=s) for s in range(15)]
    assert all(interval.stop == 20 for interval in intervals)
    lengths = [len(interval) for interval in intervals]
    assert lengths[0] == 14 and lengths == sorted(lengths) and lengths[9:] == [18] * 6
    with pytest.raises(ValueError, match="1 <= shortest <= longest <= steps"):
        windows.backward_interval(10, shortest=4, longest=11, stages=5, stage=0)


def test_the_noise_of_one_depth_does_not_grow() -> None:
    assert windows.growing_noise(0.7, 0.5, 1) == (0.7,)
    assert windows.growing_noise(1.0, 0.5, 3) == (1.0, 1.25, 1.5)
