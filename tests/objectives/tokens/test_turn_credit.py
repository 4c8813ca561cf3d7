"""TRLOO's advantages against loops over the formula, and cases that can be reckoned in the head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genrl.objectives.tokens.token_credit import turn_leave_one_out, turn_returns

NAN = float("nan")


def test_a_turn_is_worth_what_follows() -> None:
    found = turn_returns(torch.tensor([[1.0, 2.0, 4.0], [3.0, NAN, NAN]]), gamma=0.5)
    wanted = torch.tensor([[3.0, 4.0, 4.0], [3.0, NAN, NAN]], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_a_turn_that_no_other_has_keeps_its_return() -> None:
    rewards = torch.tensor([[1.0, 2.0], [5.0, NAN], [7.0, NAN]])
    found = turn_leave_one_out(rewards, torch.tensor([4, 4, 9]), gamma=1.0)
    assert found.tolist() == [[-2.0, 2.0], [2.0, 0.0], [7.0, 0.0]]


def test_turns_of_equal_returns_have_exactly_no_advantage() -> None:
    found = turn_leave_one_out(torch.full((3, 2), 0.1), torch.zeros(3, dtype=torch.int64), gamma=0.9)
    assert (found == 0).all()


@pytest.mark.parametrize("gamma", [1.0, 0.7, 0.0])
def test_advantages_are_those_of_the_formula(gamma: float) -> None:
    rng = np.random.default_rng(0)
    lengths, group = [4, 2, 4, 3, 1, 4, 0], np.array([0, 0, 0, 1, 1, 1, 1])
    rewards = [rng.normal(size=n) for n in lengths]
    worth = [[sum(gamma ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))] for r in rewards]
    table, wanted = np.full((7, 4), NAN), np.zeros((7, 4))
    for row, n in enumerate(lengths):
        table[row, :n] = rewards[row]
        for k in range(n):
            others = [worth[o][k] for o in range(7) if o != row and group[o] == group[row] and lengths[o] > k]
            wanted[row, k] = worth[row][k] - (np.mean(others) if others else 0.0)
    found = turn_leave_one_out(torch.tensor(table), torch.tensor(group), gamma=gamma)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-12)
