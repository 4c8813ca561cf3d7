"""Advantage estimators of token policies: closed forms and invariants (golden arrays: test_surrogate_golden)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.objectives.tokens import token_advantages as ta

GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
REWARDS = st.lists(st.integers(-4, 4), min_size=6, max_size=6).map(lambda values: torch.tensor(values).double() / 2)


def scrambled(values: Tensor, order: list[int]) -> Tensor:
    return values[torch.tensor(order)]


@given(REWARDS, st.permutations(range(6)))
def test_estimators_do_not_depend_on_the_order_of_rows(rewards: Tensor, order: list[int]) -> None:
    lengths = torch.tensor([1, 2, 3, 4, 5, 6])
    assert torch.allclose(
        ta.length_weighted(scrambled(rewards, order), scrambled(lengths, order), scrambled(GROUP, order)),
        scrambled(ta.length_weighted(rewards, lengths, GROUP), order),
        atol=1e-12,
    )
    for estimate in (ta.leave_one_out, ta.with_virtual_reward, ta.rank_quantiles):
        plain = estimate(rewards, GROUP)
        assert torch.allclose(
            estimate(scrambled(rewards, order), scrambled(GROUP, order)), scrambled(plain, order), atol=1e-12
        )


def test_a_sample_without_score_or_without_others_gets_nothing() -> None:
    rewards = torch.tensor([1.0, torch.nan, 3.0, 5.0])
    group = torch.tensor([0, 0, 0, 1])
    assert ta.leave_one_out(rewards, group).tolist() == [-2.0, 0.0, 2.0, 0.0]
    assert ta.rank_quantiles(rewards, group)[[1, 3]].tolist() == [0.0, 0.0]
    virtual = ta.with_virtual_reward(rewards, group, best=5.0)
    assert virtual[1] == 0.0 and virtual[3] == 0.0  # equal to the virtual sample: no spread
    assert ta.whitened(torch.zeros(2, 3), torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2


@given(REWARDS, st.lists(st.integers(1, 9), min_size=6, max_size=6))
def test_opo_weighs_the_baseline_by_lengths(rewards: Tensor, lengths: list[int]) -> None:
    found = ta.length_weighted(rewards, torch.tensor(lengths), GROUP).numpy()
    for at in (slice(0, 3), slice(3, 6)):
        own = rewards[at].numpy()
        assert np.allclose(found[at], own - np.average(own, weights=lengths[at]))
    if len(set(lengths)) == 1:
        assert np.allclose(found, (rewards - rewards.view(2, 3).mean(1).repeat_interleave(3)).numpy())


def test_opo_leaves_out_what_has_no_score() -> None:
    rewards = torch.tensor([1.0, torch.nan, 3.0, 5.0])
    found = ta.length_weighted(rewards, torch.tensor([1, 7, 3, 2]), torch.tensor([0, 0, 0, 1]))
    assert found.tolist() == [-1.5, 0.0, 0.5, 0.0]


@given(REWARDS)
def test_gpg_makes_up_for_groups_without_spread(rewards: Tensor) -> None:
    advantage = rewards - rewards.view(2, 3).mean(1).repeat_interleave(3)
    spread = sum(np.ptp(own) > 0 for own in rewards.view(2, 3).numpy())
    centred = torch.where(torch.isclose(advantage, torch.zeros(1).double()), 0.0, advantage)
    assert float(ta.informative_factor(centred, GROUP)) == (6 / (3 * spread) if spread else 1.0)


def test_components_that_do_not_apply_add_nothing() -> None:
    components = torch.tensor([[1.0, torch.nan], [0.0, torch.nan], [2.0, 4.0], [1.0, 2.0]])
    group = torch.tensor([0, 0, 1, 1])
    result = ta.normalise_then_sum(components, [1.0, 1.0], group, eps=0.0, rewhiten=False)
    half = math.sqrt(0.5)
    assert torch.allclose(result, torch.tensor([half, -half, 2 * half, -2 * half]).double())
    with pytest.raises(ValueError, match="K weights"):
        ta.normalise_then_sum(components, [1.0], group)


@given(REWARDS)
def test_the_first_visit_is_a_plain_z_score_and_the_state_is_that_of_all_visits(rewards: Tensor) -> None:
    output = ta.smoothed_advantages(rewards, GROUP, ["a", "b"], {})
    for slot, name in enumerate("ab"):
        scores = rewards[GROUP == slot]
        spread = float(scores.std())
        wanted = (scores - scores.mean()) / spread if spread > 1e-9 else torch.zeros(3).double()
        assert torch.allclose(output.advantage[GROUP == slot], wanted, atol=1e-9)
        assert output.visits[name][0] == 1 and abs(output.visits[name][1] - float(scores.mean())) < 1e-12


def test_visits_are_counted_in_order_and_not_changed_in_place() -> None:
    before = {"a": (1, 0.0, 1.0)}
    same = ta.smoothed_advantages(torch.tensor([0.0, 2.0, 1.0, 3.0]), torch.tensor([0, 0, 1, 1]), ["a", "a"], before)
    assert before == {"a": (1, 0.0, 1.0)} and same.visits["a"][0] == 3
    with pytest.raises(ValueError, match="one prompt per group"):
        ta.smoothed_advantages(torch.zeros(2), torch.zeros(2).long(), ["a", "b"], {})
    unscored = ta.smoothed_advantages(torch.full((2,), torch.nan), torch.zeros(2).long(), ["a"], before)
    assert unscored.visits == before and unscored.advantage.tolist() == [0.0, 0.0]


def test_returns_run_backwards_over_valid_tokens() -> None:
    rewards = torch.tensor([[1.0, 2.0, torch.nan, 4.0], [5.0, torch.nan, torch.nan, torch.nan]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])
    returns = ta.token_returns(rewards, mask, gamma=0.5)
    # the observation in the middle (mask 0) is no step of its own
    assert returns.tolist() == [[3.0, 4.0, 0.0, 4.0], [5.0, 0.0, 0.0, 0.0]]


@given(st.integers(0, 99))
def test_whitening_is_of_valid_tokens_only(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, mask = torch.randn(3, 4, generator=generator), torch.rand(3, 4, generator=generator) < 0.6
    mask[0, :2] = True
    scores = ta.whitened(torch.where(mask, values, torch.inf), mask, eps=0.0)[mask]
    assert torch.allclose(scores.mean(), torch.zeros(()).double(), atol=1e-12)
    assert torch.allclose(scores.std(), torch.ones(()).double())  # over the tokens less one, as REINFORCE++'s code
    normal = ta.batch_normalised(torch.where(mask, values, torch.nan), mask, eps=0.0)
    assert torch.allclose(normal[mask].std(), torch.ones(()).double()) and bool((normal[~mask] == 0).all())


def test_equal_values_are_not_noise_to_be_whitened() -> None:
    mask = torch.ones(2, 3)
    assert ta.whitened(torch.full((2, 3), 0.1), mask, eps=0.0).tolist() == [[0.0] * 3] * 2


def test_one_factor_per_row() -> None:
    mask = torch.tensor([[1, 1], [1, 0]])
    assert ta.scaled(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 2.0]), mask).tolist() == [0.5, 4.0]
    by_token = torch.tensor([[1.0, 2.0], [3.0, torch.nan]])
    assert ta.scaled(by_token, torch.tensor([0.5, 2.0]), mask).tolist() == [[0.5, 1.0], [6.0, 0.0]]


def test_an_all_wrong_group_is_pushed_away() -> None:
    """NGRPO's point: mean 1/4, sample std 1/2 of (0, 0, 0, 1)."""
    advantage = ta.with_virtual_reward(torch.zeros(3), torch.zeros(3, dtype=torch.long), eps=0.0)
    assert torch.allclose(advantage, torch.full((3,), -0.5).double())


def test_the_coarse_step_answers_for_the_fine_one() -> None:
    high, low, group = torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0]), torch.zeros(2).long()
    output = ta.hierarchical_advantages(high, low, group)
    assert torch.allclose(output.high, output.low) and bool(output.high[1] > 0)
    assert ta.hierarchical_advantages(high, low, group, share=0.0).high.tolist() == [0.0, 0.0]
