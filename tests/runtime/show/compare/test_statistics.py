"""Win rates, agreement and predictors against scipy, published values and what can be counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from genrl.runtime.show.compare.statistics import (
    accuracy,
    decided,
    krippendorff_alpha,
    same_answers,
    share,
    win_rate,
)


@given(trials=st.integers(1, 500), part=st.floats(0, 1))
def test_shares_have_scipys_wilson_interval(trials: int, part: float) -> None:
    won = round(part * trials)
    found = share(won, trials)
    wanted = binomtest(won, trials).proportion_ci(method="wilson")
    assert found is not None and found.value == won / trials and found.count == trials
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_win_rate_counts_ties_by_half_and_pairs_once() -> None:
    """Six pairs: B, B, B, A, tie, and one on which B, B and A were said."""
    found = win_rate([[1], [1], [1], [0], [0.5], [1, 1, 0]])
    assert found is not None and found.value == pytest.approx((3 + 0.5 + 2 / 3) / 6) and found.count == 6
    even = win_rate([[0.5]] * 10)
    wanted = binomtest(5, 10).proportion_ci(method="wilson")
    assert even is not None and (even.low, even.high) == pytest.approx((wanted.low, wanted.high))
    assert win_rate([]) is None


def test_decided_leaves_out_overall_ties_and_same_answers_are_counted_by_pairs_of_judges() -> None:
    assert decided([[1], [0], [0.5], [1, 0], [1, 0.5], [0, 0.5, 0.5]]) == [True, False, True, False]
    assert same_answers([["left"], ["left", "left"], ["left", "tie", "left"]]) == (2, 4)


def test_accuracy_of_a_reward() -> None:
    found = accuracy([True, True, False, False], [0.3, -0.1, -2.0, 0.0])  # right, wrong, right, half
    assert found is not None and found.value == 2.5 / 4 and found.count == 4
    assert accuracy([], []) is None


def test_krippendorff_of_the_published_example() -> None:
    """Krippendorff 2011, section C: four observers, twelve units, nominal data: 0.743."""
    rows = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    ]
    units = [[row[k] for row in rows if row[k] is not None] for k in range(12)]
    assert krippendorff_alpha(units) == pytest.approx(0.743, abs=5e-4)


@given(units=st.lists(st.lists(st.sampled_from(["left", "right", "tie"]), min_size=0, max_size=4), max_size=30))
def test_krippendorff_by_its_definition(units: list[list[str]]) -> None:
    """1 - observed / expected disagreement, each as a mean over pairs of values."""
    paired = [answers for answers in units if len(answers) > 1]
    values = [answer for answers in paired for answer in answers]
    n = len(values)
    expected = sum(values[i] != values[j] for i in range(n) for j in range(n) if i != j) / max(1, n * (n - 1))
    observed = sum(
        sum(one != other for one in answers for other in answers) / (len(answers) - 1) for answers in paired
    ) / max(1, n)
    found = krippendorff_alpha(units)
    if expected == 0:
        assert found is None
    else:
        assert found == pytest.approx(1 - observed / expected)
