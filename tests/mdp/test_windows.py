"""Windows that move, and the laws of those that are drawn: full at every iteration, where they should be."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genrl.mdp import windows
from tests.reference.released_windows import linear_hold

HOLDS = {
    "constant": partial(windows.constant_hold, every=3),
    "linear": partial(linear_hold, longest=6, shortest=1, steps=20),
    "exponential": partial(windows.exponential_hold, every=5, rate=0.3, threshold=2),
    "zero": lambda start: 0,
}


@given(
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 12),
    st.integers(0, 3),
    st.sampled_from(sorted(HOLDS)),
    st.booleans(),
    st.integers(0, 200),
)
def test_a_moving_window_is_always_full(
    size: int, low: int, extra: int, stride: int, hold: str, wrap: bool, iteration: int
) -> None:
    high = low + size + extra
    arguments = {"hold": HOLDS[hold], "stride": stride, "wrap": wrap}
    window = windows.moving_window(size, low, high, iteration=iteration, **arguments)
    assert len(window) == size and low <= window[0] and window[-1] < high
    if iteration:
        before = windows.moving_window(size, low, high, iteration=iteration - 1, **arguments).start
        assert 0 <= window.start - before <= stride or (wrap and window.start == low)


@pytest.mark.parametrize("hold", sorted(HOLDS))
def test_a_moving_window_reaches_every_step_and_stays_as_long_as_told(hold: str) -> None:
    starts = [windows.moving_window(4, 0, 19, iteration=i, hold=HOLDS[hold], stride=4).start for i in range(80)]
    assert sorted(set(starts)) == [0, 4, 8, 12, 15]
    assert all(starts.count(start) == max(HOLDS[hold](start), 1) for start in (0, 4, 8, 12))
    wrapped = [
        windows.moving_window(4, 0, 19, iteration=i, hold=HOLDS[hold], stride=4, wrap=True).start for i in range(80)
    ]
    period = sum(max(HOLDS[hold](start), 1) for start in (0, 4, 8, 12, 15))
    assert wrapped[:40] == (wrapped[:period] * 40)[:40]


def test_a_window_of_stride_0_is_frozen() -> None:
    starts = {windows.moving_window(4, 2, 19, iteration=i, hold=HOLDS["constant"], stride=0).start for i in range(50)}
    assert starts == {2}


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
