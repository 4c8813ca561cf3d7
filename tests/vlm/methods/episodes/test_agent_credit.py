"""Credit at the ends of episodes, the value head, and turns laid out as rows."""

from __future__ import annotations

import pytest
import torch

from genrl.objectives.tokens.token_credit import token_gae
from genrl.vlm.episodes.critic import ValueHead, credit_of_steps, credit_of_tokens

CONSTANTS = {"gamma": 0.9, "lam": 0.8}


def test_steps_are_bootstrapped_where_the_walk_ends_and_have_no_credit_where_they_are_cut() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    values = torch.tensor([[0.5, 0.1], [0.2, 0.3]])
    terminated = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    truncated = torch.tensor([[True, False], [False, False]])
    found = credit_of_steps(values, rewards, terminated, truncated, torch.tensor([0.7, 9.0]), **CONSTANTS)
    last = [0.0 + 0.9 * 0.7 - 0.2, 2.0 - 0.3]  # goes on; terminated
    first = [0.0, 0.0 + 0.9 * 0.3 - 0.1 + 0.9 * 0.8 * last[1]]  # cut; followed by the terminated one
    torch.testing.assert_close(found.advantages, torch.tensor([*first, *last], dtype=torch.float64))
    assert float(found.returns[0]) == pytest.approx(0.5)  # its value is its own target


def test_tokens_of_an_episode_are_those_of_bad_and_cuts_are_bootstrapped() -> None:
    """One slot: an episode of two actions that is cut, one of one action that is terminated, one that goes on."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(4, 1, 3, generator=generator)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()[:, None]
    rewards = torch.tensor([[0.1], [0.2], [0.3], [0.4]])
    terminated = torch.tensor([[0], [0], [1], [0]]).bool()
    truncated = torch.tensor([[0], [1], [0], [0]]).bool()
    after = torch.tensor([[0.0], [5.0], [0.0], [7.0]])
    found = credit_of_tokens(values, mask, rewards, terminated, truncated, after, **CONSTANTS)

    def alone(rows: slice, following: float, done: list[bool]) -> torch.Tensor:
        last = torch.tensor([[following, 0.0, 0.0]])
        lengths = mask[rows, 0].sum(1)
        own = torch.cat([values[rows, 0], last])
        return token_gae(own, lengths, rewards[rows, 0], torch.tensor(done), **CONSTANTS)

    wanted = torch.cat(
        [alone(slice(0, 2), 5.0, [False, False]), alone(slice(2, 3), 0.0, [True]), alone(slice(3, 4), 7.0, [False])]
    )
    torch.testing.assert_close(found.advantages, wanted)
    # by hand: the action that is cut, from its last token back; gamma counts between actions, not inside of them
    v = values[:, 0].double()
    third = 0.2 + 0.9 * 5.0 - v[1, 2]
    second = v[1, 2] - v[1, 1] + 0.8 * third
    torch.testing.assert_close(found.advantages[1, 1:], torch.stack([second, third]))
    kept = mask[:, 0]
    torch.testing.assert_close(found.returns[kept], (wanted + v)[kept])


def test_a_new_critic_says_nothing_and_does_not_train_the_model() -> None:
    states = torch.randn(2, 3, 4, requires_grad=True)
    head = ValueHead(4, (6, 5), seed=0)
    values = head(states)
    assert values.shape == (2, 3) and bool((values == 0).all())
    values.sum().backward()
    assert states.grad is None and sum(isinstance(layer, torch.nn.Linear) for layer in head.layers) == 3
    for one, other in zip(head.parameters(), ValueHead(4, (6, 5), seed=0).parameters(), strict=True):
        assert torch.equal(one, other)
