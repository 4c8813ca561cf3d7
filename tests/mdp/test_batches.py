"""Prompt order: a permutation per epoch, the same for any number of processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genrl.mdp import batches


@given(st.integers(1, 40), st.integers(1, 25), st.integers(0, 2**40), st.integers(0, 30))
def test_every_row_is_used_once_before_any_is_used_twice(rows: int, per_iteration: int, seed: int, start: int) -> None:
    used = []
    for iteration in range(start + 3):
        used += batches.prompt_indices(rows, per_iteration, seed=seed, iteration=iteration)
    for epoch in range(len(used) // rows):
        assert sorted(used[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 100))
def test_an_iteration_is_the_same_whatever_was_asked_before(rows: int, per_iteration: int, iteration: int) -> None:
    """Resuming needs no saved position, and a different number of prompts per iteration reads the same sequence."""
    alone = batches.prompt_indices(rows, per_iteration, seed=3, iteration=iteration)
    one_by_one = [
        batches.prompt_indices(rows, 1, seed=3, iteration=position)[0]
        for position in range(iteration * per_iteration, (iteration + 1) * per_iteration)
    ]
    assert alone == one_by_one


def test_the_order_is_pinned() -> None:
    """A run must read the same prompts tomorrow: a change of the rule is a change of every seed."""
    assert batches.prompt_indices(7, 5, seed=0, iteration=0) == PINNED[:5]
    assert batches.prompt_indices(7, 5, seed=0, iteration=1) == PINNED[5:]


PINNED = [4, 3, 5, 0, 6, 2, 1, 6, 3, 5]


@pytest.mark.parametrize(("rows", "count", "iteration"), [(0, 1, 0), (3, 0, 0), (3, 1, -1)])
def test_impossible_requests_are_refused(rows: int, count: int, iteration: int) -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        batches.prompt_indices(rows, count, seed=0, iteration=iteration)


@given(count=st.integers(0, 40), size=st.integers(1, 7), processes=st.integers(1, 5))
def test_shares_have_every_row_once_and_processes_in_step(count: int, size: int, processes: int) -> None:
    found = [list(batches.shares(count, size, process, processes)) for process in range(processes)]
    assert len({len(mine) for mine in found}) == 1
    assert sorted(row for mine in found for rows, counts in mine if counts for row in rows) == list(range(count))
    assert all(0 < len(rows) <= size for mine in found for rows, _ in mine)


@given(
    st.lists(st.integers(0, 2), min_size=6, max_size=40), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**40)
)
def test_pieces_are_of_one_bucket_and_use_its_rows_alike(
    buckets: list[int], together: int, pieces: int, seed: int
) -> None:
    members = {b: [row for row, own in enumerate(buckets) if own == b] for b in buckets}
    per_epoch = sum(len(rows) // together for rows in members.values()) * together
    if not per_epoch:
        with pytest.raises(ValueError, match="of one bucket"):
            batches.bucketed_indices(buckets, pieces * together, together, seed=seed, iteration=0)
        return
    used: list[int] = []
    iteration = 0
    while len(used) < 2 * per_epoch:
        used += batches.bucketed_indices(buckets, pieces * together, together, seed=seed, iteration=iteration)
        iteration += 1
    for start in range(0, len(used), together):
        assert len({buckets[row] for row in used[start : start + together]}) == 1
    for epoch in range(2):
        once = used[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert len(set(once)) == per_epoch
        for rows in members.values():
            assert sum(row in rows for row in once) == len(rows) // together * together
    again = batches.bucketed_indices(buckets, together, together, seed=seed, iteration=1)
    assert again == used[together : 2 * together] or len(used) == together
    with pytest.raises(ValueError, match="of one bucket"):
        batches.bucketed_indices(buckets, 2 * together + 1, 2 * together, seed=seed, iteration=0)
