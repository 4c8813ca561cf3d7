"""Advantage estimators of token policies: closed forms and invariants (golden arrays: test_token_surrogates)."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.objectives import groups as group_filters
from genrl.objectives import token_advantages as ta
from genrl.objectives import token_credit as tc
from genrl.objectives import token_surrogates
from genrl.objectives import token_weights as tw

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
    result = ta.length_weighted(rewards, torch.tensor([1, 7, 3, 2]), group)
    assert result.tolist() == [-1.5, 0.0, 0.5, 0.0]
    assert ta.whitened(torch.zeros(2, 3), torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2
    assert ta.whitened(torch.full((2, 3), 0.1), torch.ones(2, 3), eps=0.0).tolist() == [[0.0] * 3] * 2


@given(REWARDS)
def test_gpg_makes_up_for_groups_without_spread(rewards: Tensor) -> None:
    advantage = rewards - rewards.view(2, 3).mean(1).repeat_interleave(3)
    spread = sum(np.ptp(own) > 0 for own in rewards.view(2, 3).numpy())
    centred = torch.where(torch.isclose(advantage, torch.zeros(1).double()), 0.0, advantage)
    assert float(ta.informative_factor(centred, GROUP)) == (6 / (3 * spread) if spread else 1.0)


def test_components_that_do_not_apply_add_nothing_and_visits_are_counted_in_order() -> None:
    """Visits are not changed in place."""
    components = torch.tensor([[1.0, torch.nan], [0.0, torch.nan], [2.0, 4.0], [1.0, 2.0]])
    group = torch.tensor([0, 0, 1, 1])
    result = ta.normalise_then_sum(components, [1.0, 1.0], group, eps=0.0)
    half = math.sqrt(0.5) / math.sqrt(5 / 3)  # of the sums' own standard deviation
    assert torch.allclose(result, torch.tensor([half, -half, 2 * half, -2 * half]).double())
    before = {"a": (1, 0.0, 1.0)}
    same = ta.smoothed_advantages(torch.tensor([0.0, 2.0, 1.0, 3.0]), torch.tensor([0, 0, 1, 1]), ["a", "a"], before)
    assert before == {"a": (1, 0.0, 1.0)} and same.visits["a"][0] == 3
    unscored = ta.smoothed_advantages(torch.full((2,), torch.nan), torch.zeros(2).long(), ["a"], before)
    assert unscored.visits == before and unscored.advantage.tolist() == [0.0, 0.0]


def test_returns_run_backwards_over_valid_tokens_and_each_row_has_one_factor() -> None:
    rewards = torch.tensor([[1.0, 2.0, torch.nan, 4.0], [5.0, torch.nan, torch.nan, torch.nan]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])
    returns = ta.token_returns(rewards, mask, gamma=0.5)
    # the observation in the middle (mask 0) is no step of its own
    assert returns.tolist() == [[3.0, 4.0, 0.0, 4.0], [5.0, 0.0, 0.0, 0.0]]
    mask = torch.tensor([[1, 1], [1, 0]])
    assert ta.scaled(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 2.0]), mask).tolist() == [0.5, 4.0]
    by_token = torch.tensor([[1.0, 2.0], [3.0, torch.nan]])
    assert ta.scaled(by_token, torch.tensor([0.5, 2.0]), mask).tolist() == [[0.5, 1.0], [6.0, 0.0]]


# -- Which groups are kept
NAN = float("nan")
GROUP_GROUP_FILTERS = torch.tensor([7, 7, 2, 2, 5, 5, 9, 9])
ACCURACY = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, NAN, NAN])


def test_always_and_never_solved_groups_are_dropped() -> None:
    kept = [False, False, False, False, True, True, False, False]
    assert group_filters.within(ACCURACY, GROUP_GROUP_FILTERS).tolist() == kept
    assert group_filters.with_spread(ACCURACY, GROUP_GROUP_FILTERS).tolist() == kept
    lowest = group_filters.within(ACCURACY, GROUP_GROUP_FILTERS, low=-1.0)
    assert lowest.tolist() == [False, False, *[True] * 4, False, False]
    at_a_bound = {"low": 0.5, "high": 1.0}  # both are outside
    assert not group_filters.within(ACCURACY, GROUP_GROUP_FILTERS, **at_a_bound).any()
    equal = torch.tensor([0.1, 0.1, 0.1, 0.1 + 1e-6])  # which are not numbers of the machine
    assert group_filters.with_spread(equal, torch.tensor([0, 0, 1, 1])).tolist() == [False, False, True, True]
    assert group_filters.group_means(torch.tensor([1.0, NAN, 3.0]), torch.zeros(3).long()).tolist() == [2.0] * 3


# -- Losses of whole groups: closed forms and gradients (golden arrays: test_token_surrogates)
def test_the_first_update_has_a_finite_gradient_of_one_over_epsilon() -> None:
    score = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([-1.0, 0.0, 1.0])
    loss = token_surrogates.regression_loss(score, advantage, torch.zeros(3).long(), eps=1e-3).sum()
    (gradient,) = torch.autograd.grad(loss, score)
    assert torch.allclose(gradient, -2 * advantage.double() / 1e-3)
    alone = token_surrogates.regression_loss(score[:1], torch.tensor([0.5]), torch.zeros(1).long())
    assert alone.tolist() == [0.25]


# -- ArCHer's losses against NumPy
def test_critics_and_advantages_are_those_of_the_formulas() -> None:
    rng = np.random.default_rng(0)
    q, v, slow_q, slow_v = (rng.normal(size=(2, 5)) for _ in range(4))
    rewards, ended = rng.normal(size=5), np.array([0, 1, 0, 0, 1])
    wanted_q = sum(np.mean((q[c] - rewards - 0.9 * (1 - ended) * slow_v[c]) ** 2) for c in range(2))
    wanted_v = sum(np.mean((v[c] - slow_q[c]) ** 2) for c in range(2))
    tensors = [torch.tensor(one, requires_grad=True) for one in (q, v, slow_q, slow_v)]
    result = tc.critic_losses(*tensors, torch.tensor(rewards), torch.tensor(ended).bool(), gamma=0.9)
    assert float(result.q.detach()) == pytest.approx(wanted_q) and float(result.v.detach()) == pytest.approx(wanted_v)
    (result.q + result.v).backward()
    assert tensors[0].grad is not None and tensors[2].grad is None and tensors[3].grad is None
    advantages = tc.utterance_advantages(tensors[0], tensors[1])
    np.testing.assert_allclose(advantages.numpy(), q.min(0) - v.min(0))
    assert not advantages.requires_grad


# -- TRLOO's advantages against loops over the formula, and cases that can be reckoned in the head
def test_a_turn_is_worth_what_follows_and_is_compared_with_that_turn_of_others() -> None:
    """One that no other has keeps its return; equal returns have exactly no advantage."""
    actual = tc.turn_returns(torch.tensor([[1.0, 2.0, 4.0], [3.0, NAN, NAN]]), gamma=0.5)
    wanted = torch.tensor([[3.0, 4.0, 4.0], [3.0, NAN, NAN]], dtype=torch.float64)
    torch.testing.assert_close(actual, wanted, equal_nan=True)
    rewards = torch.tensor([[1.0, 2.0], [5.0, NAN], [7.0, NAN]])
    actual = tc.turn_leave_one_out(rewards, torch.tensor([4, 4, 9]), gamma=1.0)
    assert actual.tolist() == [[-2.0, 2.0], [2.0, 0.0], [7.0, 0.0]]
    actual = tc.turn_leave_one_out(torch.full((3, 2), 0.1), torch.zeros(3, dtype=torch.int64), gamma=0.9)
    assert (actual == 0).all()


# -- TEMPO's credit of branches: a tree of four answers, worked out, and two that are alike
def test_a_branch_has_the_mean_of_those_that_take_it_less_the_mean_before() -> None:
    """V is 1/2 of all four, 2/3 after 1, 1/2 after 1 2, and an answer's own where it is alone."""
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 5, 9], [6, 9, 9], [1, 2, 3], [1, 2, 3], [1, 2, 4]])
    lengths, group = torch.tensor([3, 3, 2, 1, 3, 3, 3]), torch.tensor([5, 5, 5, 5, 2, 2, 5])
    mask = torch.arange(3) < lengths[:, None]
    rewards = torch.tensor([1.0, 0, 1, 0, 1, 0, NAN])  # the last has no score: it moves no mean
    actual = tc.branch_credit(rewards, tokens, mask, group)
    wanted = [[1 / 6, -1 / 6, 1 / 2], [1 / 6, -1 / 6, -1 / 2], [1 / 6, 1 / 3, 0], [-1 / 2, 0, 0]]
    torch.testing.assert_close(actual[:4], torch.tensor(wanted, dtype=torch.float64))
    assert (actual[4:6] == 0).all(), "answers that never part have GRPO's advantage"
    assert torch.allclose(actual[:4].sum(1), rewards[:4].double() - 0.5), "the credits of an answer add up"
    order = [3, 5, 0, 6, 2, 4, 1]
    junk = torch.where(mask, tokens, torch.randint(9, tokens.shape))
    other = tc.branch_credit(*(scrambled(one, order) for one in (rewards, junk, mask, group)))
    torch.testing.assert_close(other, scrambled(actual, order))


# -- Credit from a critic: closed forms (golden arrays: test_token_surrogates)
def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_time_limit_teaches_nothing_and_starts_anew() -> None:
    rewards, values = random(3, 3), random(4, 3)
    truncated = torch.tensor([0, 1, 0])
    credit = tc.step_gae(rewards, values, torch.zeros(3), truncated, torch.tensor(0.5), gamma=0.9, lam=0.8)
    assert credit.advantages[1] == 0.0 and credit.returns[1] == values[1]
    assert torch.allclose(credit.advantages[0], rewards[0] + 0.9 * values[1] - values[0])


# -- Token weights: which tokens they keep (golden arrays: test_token_surrogates)
def test_which_tokens_and_rows_are_kept() -> None:
    """.4 times 5 is 2.0000000000000004 in some orders of evaluation; .07 times 100 is 7.000000000000001."""
    assert int(tw.top_of_row(torch.arange(5.0)[None], torch.ones(1, 5), share=0.4).sum()) == 2
    assert int(tw.top_of_row(torch.arange(100.0)[None], torch.ones(1, 100), share=0.07).sum()) == 7
    assert tw.top_of_row(torch.ones(1, 4), torch.ones(1, 4), share=0.5).tolist() == [[1.0, 1.0, 0.0, 0.0]]
    assert tw.top_entropy(torch.ones(1, 2), torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]
    # the geometric level is the sequence's to the power of one over its length
    old, mask = random(0, 4, 6), torch.arange(6) < torch.tensor([6, 1, 4, 2])[:, None]
    sampler = old + 0.5 * random(1, 4, 6)
    levels = ("token", "sequence", "sequence_geo")
    assert all(bool((tw.mismatch_weights(old, old, mask, level=level) == 1).all()) for level in levels)
    sequence, geometric = (
        tw.mismatch_weights(old, sampler, mask, level=level, mode="truncate", high=1e9) for level in levels[1:]
    )
    assert torch.allclose(geometric ** mask.sum(dim=1, keepdim=True), sequence)
    # only bad rows that drifted away are left out
    log_prob = torch.tensor([[-1.0, -1.0], [-3.0, -3.0], [-3.0, -3.0], [-3.0, torch.nan]])
    sampler = torch.full((4, 2), -1.0)
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    advantage = torch.tensor([-1.0, -1.0, 1.0, -1.0])
    keep = tw.off_policy_mask(log_prob, sampler, advantage, mask, threshold=1.0)
    assert keep.tolist() == [[1.0], [0.0], [1.0], [0.0]]


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_geo"])
def test_bounds_of_rejection_on_the_inverse_are_one_over_these(level: Any) -> None:
    """Programs that bound pi_rollout / pi_old by (low, high) reject what 1 / high and 1 / low reject here."""
    old, mask = torch.zeros(64, 5, dtype=torch.float64), torch.ones(64, 5)
    sampler = old + 0.1 * torch.randn(old.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    low, high = 0.8, 1.02  # of no symmetry: with the same bounds other tokens are rejected
    theirs = torch.where(mask.bool(), sampler - old, 0.0)
    if level != "token":
        theirs = theirs.sum(1, keepdim=True) / (mask.sum(1, keepdim=True) if level == "sequence_geo" else 1)
    accepted = (theirs.exp() >= low) & (theirs.exp() <= high)
    result = tw.mismatch_weights(old, sampler, mask, level=level, low=1 / high, high=1 / low)
    assert torch.equal(result > 0, accepted) and 0 < int(accepted.sum()) < accepted.numel()
    same = tw.mismatch_weights(old, sampler, mask, level=level, low=low, high=high)
    assert not torch.equal(same > 0, accepted)
