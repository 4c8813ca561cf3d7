"""Implicit Q-learning: cases worked out by hand, and what the losses promise. Golden arrays: test_feasibility."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.objectives.surrogates import iql

numbers = st.lists(st.floats(-5, 5), min_size=1, max_size=20)


def test_targets() -> None:
    rewards, values = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.5, 0.5, 2.0], requires_grad=True)
    target = iql.q_target(rewards, values, torch.tensor([False, True, False]), torch.tensor([0.9, 0.9, 0.81]))
    assert target.tolist() == pytest.approx([0.45, 1.0, 1.62]) and not target.requires_grad


@given(numbers, st.floats(0, 10))
def test_weights_follow_the_advantage(values: list[float], temperature: float) -> None:
    q = torch.tensor(values, dtype=torch.float64)
    weights = iql.advantage_weights(q, torch.zeros_like(q), temperature=temperature, largest=100.0)
    order = q.argsort()
    assert bool((weights[order].diff() >= 0).all()) and bool((weights <= 100).all()) and bool((weights >= 0).all())
    if temperature == 0:
        assert bool((weights == 1).all())


def test_weights_by_hand() -> None:
    weights = iql.advantage_weights(torch.tensor([1.0, 9.0]), torch.tensor([0.5, 0.0]), temperature=2.0, largest=50.0)
    assert weights.tolist() == pytest.approx([math.e, 50.0])
    with pytest.raises(ValueError, match="negative temperature"):
        iql.advantage_weights(torch.ones(1), torch.ones(1), temperature=-1.0, largest=1.0)
