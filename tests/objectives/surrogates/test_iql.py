"""Implicit Q-learning: cases worked out by hand, and what the losses promise. Golden arrays: test_feasibility."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.objectives.surrogates import iql

numbers = st.lists(st.floats(-5, 5), min_size=1, max_size=20)


@given(st.floats(0.05, 0.95), numbers)
def test_an_expectile_lies_between_worst_and_best_and_rises(expectile: float, values: list[float]) -> None:
    q = torch.tensor(values, dtype=torch.float64)

    def minimiser(level: float) -> float:
        m = q.mean()
        for _ in range(200):  # the fixed point of m = sum w q / sum w, w = |level - 1[q < m]|
            w = torch.where(q < m, 1.0 - level, level)
            m = (w * q).sum() / w.sum()
        return float(m)

    found = minimiser(expectile)
    assert q.min() - 1e-9 <= found <= q.max() + 1e-9
    m = torch.tensor(found, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(iql.expectile_loss(q - m, expectile).mean(), m)
    assert abs(float(slope)) < 1e-6
    assert minimiser(min(expectile + 0.04, 0.99)) >= found - 1e-9
    torch.testing.assert_close(iql.expectile_loss(q - found, 0.5), 0.5 * (q - found) ** 2)


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
