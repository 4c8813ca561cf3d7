"""Masks, returns and groups of episodes (their golden arrays: test_gae)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.mdp.noise import generator
from genrl.objectives.advantages import episodes


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1000))
def test_the_first_episode_ends_with_its_first_done(rows: int, batch: int, size: int, seed: int) -> None:
    rng = generator(seed)
    done = torch.rand(rows, batch, size, generator=rng) < 0.2
    rewards = torch.randn(rows, batch, size, generator=rng)
    valid = episodes.first_episode_steps(done)
    for b in range(batch):
        alive, total = True, 0.0
        for t in range(rows):
            for c in range(size):
                assert valid[t, b, c] == alive
                total += float(rewards[t, b, c]) if alive else 0.0
                alive = alive and not done[t, b, c]
        assert episodes.first_episode_returns(rewards, done)[b].item() == pytest.approx(total, abs=1e-6)


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
