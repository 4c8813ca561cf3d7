"""Decisions dealt to optimiser steps: each once per epoch, the same however many processes share them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrl.vla.update.learn import minibatches


@settings(max_examples=60)
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=5), size=st.integers(1, 50), seed=st.integers(0, 9))
def test_every_decision_is_dealt_once_whoever_has_it(counts: list[int], size: int, seed: int) -> None:
    """All processes know the same of a minibatch. Numbered over all processes, first the first one's, it is the set
    that one process with all decisions gets."""
    dealt = [list(minibatches(counts, process, size, seed)) for process in range(len(counts))]
    for process, batches in enumerate(dealt):
        assert sorted(number for batch in batches for number in batch.mine.tolist()) == list(range(counts[process]))
    starts, shared = torch.tensor([0, *counts]).cumsum(0).tolist(), []
    for batch in zip(*dealt, strict=True):
        sizes = [len(own.mine) for own in batch]
        assert {own.total for own in batch} == {sum(sizes)} and {own.most for own in batch} == {max(sizes)}
        assert sum(sizes) > 0
        shared.append(
            {start + number for start, own in zip(starts, batch, strict=False) for number in own.mine.tolist()}
        )
    assert shared == [set(batch.mine.tolist()) for batch in minibatches([sum(counts)], 0, size, seed)]


@settings(max_examples=60)
@given(total=st.integers(1, 200), size=st.integers(1, 50))
def test_none_is_a_small_remainder(total: int, size: int) -> None:
    sizes = [batch.total for batch in minibatches([total], 0, size, 3)]
    assert max(sizes) - min(sizes) <= 1 and len(sizes) == max(1, round(total / size))


def test_the_order_is_that_of_the_keys() -> None:
    def order(*keys: int | str) -> list[int]:
        return [number for batch in minibatches([50], 0, 8, *keys) for number in batch.mine.tolist()]

    assert order(1, "minibatches", 2, 3) == order(1, "minibatches", 2, 3)
    assert len({tuple(order(1, "minibatches", 2, epoch)) for epoch in range(4)}) == 4
    assert order(0) != list(range(50)) and not list(minibatches([0, 0], 0, 16, 1))
