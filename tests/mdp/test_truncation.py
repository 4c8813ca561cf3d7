"""Which steps a reward's gradient reaches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.diffusion.methods.draft import train as truncation


@given(st.integers(1, 40), st.data())
def test_truncated_steps_end_with_the_last(num_steps: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, num_steps))
    assert list(truncation.last_steps(num_steps, k)) == list(range(num_steps))[-k:]
    high = data.draw(st.integers(k, num_steps))
    update = data.draw(st.integers(0, 99))
    drawn = truncation.random_truncation(num_steps, low=k, high=high, seed=3, update=update)
    assert drawn.stop == num_steps and k <= len(drawn) <= high
    assert drawn == truncation.random_truncation(num_steps, low=k, high=high, seed=3, update=update)


def test_lengths_and_steps_are_drawn_evenly() -> None:
    lengths = torch.tensor([len(truncation.random_truncation(5, seed=1, update=u)) for u in range(2000)])
    assert (torch.bincount(lengths, minlength=6)[1:] - 400).abs().max() < 5 * 18
    steps = torch.tensor([truncation.random_late_step(10, low=6, seed=1, update=u) for u in range(2000)])
    counts = torch.bincount(steps, minlength=10)
    assert counts[:6].sum() == 0 and (counts[6:] - 500).abs().max() < 5 * 20
    assert {truncation.random_late_step(10, low=6, high=7, seed=s, update=0) for s in range(9)} == {6}


def test_ranges_that_do_not_exist_are_refused() -> None:
    for k in (0, 6):
        with pytest.raises(ValueError, match="1 to 5 of 5 steps"):
            truncation.last_steps(5, k)
    with pytest.raises(ValueError, match="chosen from 1 .. 5, got 3 .. 2"):
        truncation.random_truncation(5, low=3, high=2, seed=0, update=0)
    with pytest.raises(ValueError, match="chosen from 0 .. 4, got 5 .. 4"):
        truncation.random_late_step(5, low=5, seed=0, update=0)
