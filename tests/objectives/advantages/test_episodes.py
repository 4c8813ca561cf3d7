"""Masks, returns and groups of episodes (their golden arrays: test_gae)."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.objectives.advantages import episodes


def test_the_row_after_a_done_is_no_transition() -> None:
    done = torch.tensor([[False, True], [True, False], [False, False], [False, True]])
    valid = episodes.valid_transitions(done, carried=torch.tensor([True, False]))
    assert valid.tolist() == [[False, True], [True, False], [False, True], [True, True]]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=8, max_size=8))
def test_groups_that_always_or_never_succeed_are_left_out(returns: list[float]) -> None:
    value, group = torch.tensor(returns), torch.arange(8) // 4
    kept = episodes.informative_groups(value, group, low=0.1, high=0.9)
    advantage = episodes.episode_group_advantages(value, group)
    for g in range(2):
        members = group == g
        assert kept[members].all() == (0 < value[members].mean() < 1) and kept[members].any() == kept[members].all()
        assert advantage[members].sum().abs() < 1e-9
        assert (advantage[members] != 0).any() == kept[members].any()


def test_bounds_of_the_filter_count_in() -> None:
    value, group = torch.full((10,), 0.9), torch.zeros(10, dtype=torch.long)
    assert episodes.informative_groups(value, group, low=0.1, high=0.9).all()
    assert not episodes.informative_groups(value, group, low=0.1, high=0.89).any()
