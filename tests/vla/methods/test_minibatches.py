"""Decisions dealt to optimiser steps: each once per epoch, the same however many processes share them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.vla.methods.minibatches import Minibatch, minibatches

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def dealt(counts: list[int], size: int, *keys: int | str) -> list[list[Minibatch]]:
    """By process."""
    return [list(minibatches(counts, process, size, *keys)) for process in range(len(counts))]


@given(counts=COUNTS, size=st.integers(1, 50), seed=st.integers(0, 9))
def test_every_decision_is_dealt_once(counts: list[int], size: int, seed: int) -> None:
    for process, batches in enumerate(dealt(counts, size, seed)):
        mine = [number for batch in batches for number in batch.mine.tolist()]
        assert sorted(mine) == list(range(counts[process]))


@given(counts=COUNTS, size=st.integers(1, 50))
def test_all_processes_know_the_same_of_a_minibatch(counts: list[int], size: int) -> None:
    for batch in zip(*dealt(counts, size, 3), strict=True):
        sizes = [len(own.mine) for own in batch]
        assert {own.total for own in batch} == {sum(sizes)} and {own.most for own in batch} == {max(sizes)}
        assert 1 <= sum(sizes)


@given(counts=COUNTS, size=st.integers(1, 50))
def test_a_minibatch_does_not_depend_on_who_has_the_decisions(counts: list[int], size: int) -> None:
    """Numbered over all processes, first the first one's: one process that has all gets the same sets."""
    one = [set(batch.mine.tolist()) for batch in minibatches([sum(counts)], 0, size, 3)]
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    shared = [
        {start + number for start, own in zip(starts, batch, strict=False) for number in own.mine.tolist()}
        for batch in zip(*dealt(counts, size, 3), strict=True)
    ]
    assert one == shared


@given(total=st.integers(1, 200), size=st.integers(1, 50))
def test_none_is_a_small_remainder(total: int, size: int) -> None:
    sizes = [batch.total for batch in minibatches([total], 0, size, 3)]
    assert max(sizes) - min(sizes) <= 1 and len(sizes) == max(1, round(total / size))


def test_nothing_is_dealt_of_nothing() -> None:
    assert dealt([0, 0], 16, 1) == [[], []]


def test_the_order_is_that_of_the_keys() -> None:
    def order(*keys: int | str) -> list[int]:
        return [number for batch in minibatches([50], 0, 8, *keys) for number in batch.mine.tolist()]

    assert order(1, "minibatches", 2, 3) == order(1, "minibatches", 2, 3)
    assert len({tuple(order(1, "minibatches", 2, epoch)) for epoch in range(4)}) == 4
    assert order(0) != list(range(50))
