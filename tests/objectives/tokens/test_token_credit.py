"""Credit from a critic: closed forms (golden arrays: test_surrogate_golden)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from genrl.objectives.tokens.token_credit import step_gae, token_gae


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_nothing_passes_the_end_of_an_episode() -> None:
    rewards, values = random(0, 4, 2), random(1, 4, 2)
    done = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]])
    both = step_gae(rewards, values, done, torch.zeros(4, 2), random(2, 2), gamma=0.9)
    alone = step_gae(rewards[:2], values[:2], done[:2], torch.zeros(2, 2), 99 * torch.ones(2), gamma=0.9)
    assert torch.allclose(both.advantages[:2, 0], alone.advantages[:, 0])  # environments do not mix either
    assert not torch.allclose(both.advantages[:2, 1], alone.advantages[:, 1])


def test_a_time_limit_teaches_nothing_and_starts_anew() -> None:
    rewards, values = random(3, 3), random(4, 3)
    truncated = torch.tensor([0, 1, 0])
    credit = step_gae(rewards, values, torch.zeros(3), truncated, torch.tensor(0.5), gamma=0.9, lam=0.8)
    assert credit.advantages[1] == 0.0 and credit.returns[1] == values[1]
    assert torch.allclose(credit.advantages[0], rewards[0] + 0.9 * values[1] - values[0])


def test_wrong_shapes_say_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"2 actions need values \[3, L\] and lengths in 1 .. L"):
        token_gae(torch.zeros(3, 3), torch.tensor([4, 1]), torch.zeros(2), torch.zeros(2), gamma=0.9)
