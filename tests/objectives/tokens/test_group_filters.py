"""Which groups are kept."""

from __future__ import annotations

import pytest
import torch

from genrl.objectives.advantages import groups as group_filters

NAN = float("nan")
GROUP = torch.tensor([7, 7, 2, 2, 5, 5, 9, 9])
ACCURACY = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, NAN, NAN])


def test_always_and_never_solved_groups_are_dropped() -> None:
    kept = [False, False, False, False, True, True, False, False]
    assert group_filters.within(ACCURACY, GROUP).tolist() == kept
    assert group_filters.with_spread(ACCURACY, GROUP).tolist() == kept
    assert group_filters.within(ACCURACY, GROUP, low=-1.0).tolist() == [False, False, *[True] * 4, False, False]
    with pytest.raises(ValueError, match="low < high"):
        group_filters.within(ACCURACY, GROUP, low=1.0, high=0.5)


def test_equal_rewards_that_are_not_numbers_of_the_machine_have_no_spread() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.1 + 1e-6])
    group = torch.tensor([0, 0, 1, 1])
    assert group_filters.with_spread(rewards, group).tolist() == [False, False, True, True]


def test_a_missing_score_leaves_the_mean_to_the_others() -> None:
    means = group_filters.group_means(torch.tensor([1.0, NAN, 3.0]), torch.zeros(3).long())
    assert means.tolist() == [2.0] * 3
