"""Credit from a critic: closed forms (golden arrays: test_token_golden)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.objectives.tokens.token_credit import step_gae, token_gae


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 99), st.floats(0.5, 1.0))
def test_lambda_one_is_the_return_and_lambda_zero_the_temporal_difference(seed: int, gamma: float) -> None:
    rewards, values, last = random(seed, 6), random(seed + 1, 6), random(seed + 2, 1)[0]
    none = torch.zeros(6)
    monte_carlo = step_gae(rewards, values, none, none, last, gamma=gamma, lam=1.0)
    wanted = torch.stack(
        [sum(gamma**j * rewards[k + j] for j in range(6 - k)) + gamma ** (6 - k) * last for k in range(6)]
    )
    assert torch.allclose(monte_carlo.returns, wanted)
    difference = step_gae(rewards, values, none, none, last, gamma=gamma, lam=0.0)
    assert torch.allclose(difference.advantages, rewards + gamma * torch.cat([values[1:], last[None]]) - values)


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


@given(st.integers(0, 99))
def test_actions_of_one_token_are_steps(seed: int) -> None:
    values, rewards = random(seed, 5, 1), random(seed + 1, 4)
    done = torch.tensor([0, 1, 0, 0])
    tokens = token_gae(values, torch.ones(4).long(), rewards, done, gamma=0.9, lam=0.8)
    steps = step_gae(rewards, values[:4, 0], done, torch.zeros(4), values[4, 0], gamma=0.9, lam=0.8)
    assert torch.allclose(tokens[:, 0], steps.advantages)


def test_a_long_action_is_not_discounted_more() -> None:
    """BAD's point: with V = 0, lambda 1 and one reward at the end, each token of the first action sees gamma r."""
    rewards, done = torch.tensor([0.0, 1.0]), torch.tensor([0, 1])
    arguments = (torch.zeros(3, 3), torch.tensor([3, 2]), rewards, done)
    bad = token_gae(*arguments, gamma=0.5, lam=1.0)
    assert bad.tolist() == [[0.5, 0.5, 0.5], [1.0, 1.0, 0.0]]
    naive = token_gae(*arguments, gamma=0.5, lam=1.0, gamma_within=0.5)
    assert naive.tolist() == [[0.0625, 0.125, 0.25], [0.5, 1.0, 0.0]]


def test_wrong_shapes_say_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"2 actions need values \[3, L\] and lengths in 1 .. L"):
        token_gae(torch.zeros(3, 3), torch.tensor([4, 1]), torch.zeros(2), torch.zeros(2), gamma=0.9)
