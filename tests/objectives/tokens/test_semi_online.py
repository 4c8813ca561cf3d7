"""UI-S1's credit against loops over the formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genrl.objectives.tokens.token_credit import semi_online_advantages, semi_online_returns

NAN = float("nan")


def test_a_turn_gets_what_follows_up_to_the_next_mismatch() -> None:
    rewards = torch.tensor([[1.0, 0.1, 1.0, 1.0], [1.0, 1.0, 0.5, NAN]])
    matched = torch.tensor([[True, False, True, True], [True, True, False, False]])
    wanted = [[1.0, 0.1, 1.5, 1.0], [1.5, 1.0, 0.5, NAN]]
    found = semi_online_returns(rewards, matched, gamma=0.5)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), equal_nan=True)


@pytest.mark.parametrize(("gamma", "episode", "step"), [(0.5, 1.0, 1.0), (0.0, 0.0, 1.0), (0.9, 0.7, 2.0)])
def test_advantages_are_those_of_the_formulas(gamma: float, episode: float, step: float) -> None:
    rng = np.random.default_rng(0)
    lengths = [4, 2, 4, 3, 1, 4, 0]
    group = np.array([0, 0, 0, 1, 1, 1, 1])
    rewards = [rng.choice([0.0, 0.1, 0.5, 1.0], n) for n in lengths]
    matched = [r > 0.4 for r in rewards]
    returns = []
    for r, m in zip(rewards, matched, strict=True):
        own = []
        for k in range(len(r)):
            total, power, j = r[k], gamma, k + 1
            while m[k] and j < len(r) and m[j]:
                total, power, j = total + power * r[j], power * gamma, j + 1
            own.append(total)
        returns.append(own)

    def score(value: float, others: list[float]) -> float:
        if len(others) < 2 or len(set(others)) == 1:
            return 0.0
        return (value - np.mean(others)) / (np.std(others, ddof=1) + 1e-6)

    table, flags = np.full((7, 4), NAN), np.zeros((7, 4), bool)
    wanted = np.zeros((7, 4))
    for row, n in enumerate(lengths):
        table[row, :n], flags[row, :n] = rewards[row], matched[row]
        alike = [other for other in range(7) if group[other] == group[row] and lengths[other]]
        whole = score(rewards[row].sum(), [rewards[other].sum() for other in alike])
        for k in range(n):
            own = score(returns[row][k], [returns[other][k] for other in alike if lengths[other] > k])
            wanted[row, k] = episode * whole + step * own
    found = semi_online_advantages(
        torch.tensor(table), torch.tensor(flags), torch.tensor(group), gamma=gamma, episode=episode, step=step
    )
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-9)
    assert np.abs(wanted).max() > 0.5
