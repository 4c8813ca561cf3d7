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
from genrl.objectives import token_surrogates
from genrl.objectives import token_weights as tw
from genrl.objectives.token_credit import (
    critic_losses,
    step_gae,
    token_gae,
    turn_leave_one_out,
    turn_returns,
    utterance_advantages,
    utterance_loss,
)

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


# -- Which groups are kept


NAN = float("nan")
GROUP_GROUP_FILTERS = torch.tensor([7, 7, 2, 2, 5, 5, 9, 9])
ACCURACY = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, NAN, NAN])


def test_always_and_never_solved_groups_are_dropped() -> None:
    kept = [False, False, False, False, True, True, False, False]
    assert group_filters.within(ACCURACY, GROUP_GROUP_FILTERS).tolist() == kept
    assert group_filters.with_spread(ACCURACY, GROUP_GROUP_FILTERS).tolist() == kept
    assert group_filters.within(ACCURACY, GROUP_GROUP_FILTERS, low=-1.0).tolist() == [
        False,
        False,
        *[True] * 4,
        False,
        False,
    ]
    at_a_bound = {"low": 0.5, "high": 1.0}  # both are outside
    assert not group_filters.within(ACCURACY, GROUP_GROUP_FILTERS, **at_a_bound).any()
    with pytest.raises(ValueError, match="low < high"):
        group_filters.within(ACCURACY, GROUP_GROUP_FILTERS, low=1.0, high=0.5)


def test_equal_rewards_that_are_not_numbers_of_the_machine_have_no_spread() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.1 + 1e-6])
    group = torch.tensor([0, 0, 1, 1])
    assert group_filters.with_spread(rewards, group).tolist() == [False, False, True, True]


def test_a_missing_score_leaves_the_mean_to_the_others() -> None:
    means = group_filters.group_means(torch.tensor([1.0, NAN, 3.0]), torch.zeros(3).long())
    assert means.tolist() == [2.0] * 3


# -- Losses of whole groups: closed forms and gradients (golden arrays: test_token_surrogates)


def test_the_first_update_has_a_finite_gradient_of_one_over_epsilon() -> None:
    score = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([-1.0, 0.0, 1.0])
    loss = token_surrogates.regression_loss(score, advantage, torch.zeros(3).long(), eps=1e-3).sum()
    (gradient,) = torch.autograd.grad(loss, score)
    assert torch.allclose(gradient, -2 * advantage.double() / 1e-3)
    alone = token_surrogates.regression_loss(score[:1], torch.tensor([0.5]), torch.zeros(1).long())
    assert alone.tolist() == [0.25]


def test_temperatures_are_positive() -> None:
    with pytest.raises(ValueError, match="tau must be positive, got 0"):
        token_surrogates.classification_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2).long(), tau=0.0)


# -- ArCHer's losses against NumPy


def test_critics_and_advantages_are_those_of_the_formulas() -> None:
    rng = np.random.default_rng(0)
    q, v, slow_q, slow_v = (rng.normal(size=(2, 5)) for _ in range(4))
    rewards, ended = rng.normal(size=5), np.array([0, 1, 0, 0, 1])
    wanted_q = sum(np.mean((q[c] - rewards - 0.9 * (1 - ended) * slow_v[c]) ** 2) for c in range(2))
    wanted_v = sum(np.mean((v[c] - slow_q[c]) ** 2) for c in range(2))
    tensors = [torch.tensor(one, requires_grad=True) for one in (q, v, slow_q, slow_v)]
    found = critic_losses(*tensors, torch.tensor(rewards), torch.tensor(ended).bool(), gamma=0.9)
    assert float(found.q.detach()) == pytest.approx(wanted_q) and float(found.v.detach()) == pytest.approx(wanted_v)
    (found.q + found.v).backward()
    assert tensors[0].grad is not None and tensors[2].grad is None and tensors[3].grad is None
    advantages = utterance_advantages(tensors[0], tensors[1])
    np.testing.assert_allclose(advantages.numpy(), q.min(0) - v.min(0))
    assert not advantages.requires_grad


def test_all_tokens_of_an_utterance_have_its_advantage() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -0.25, -0.25]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    loss = utterance_loss(log_prob, mask, torch.tensor([2.0, -1.0]))
    assert float(loss.detach()) == pytest.approx((2.0 * 3.0 - 1.0) / 2)
    loss.backward()
    wanted = torch.tensor([[-1.0, -1.0, 0.0], [0.5, 0.5, 0.5]])
    torch.testing.assert_close(log_prob.grad, wanted)


# -- TRLOO's advantages against loops over the formula, and cases that can be reckoned in the head


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


# -- Credit from a critic: closed forms (golden arrays: test_token_surrogates)


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


# -- Token weights: which tokens they keep (golden arrays: test_token_surrogates)


def drawn(seed: int, rows: int = 4, length: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    return values, torch.arange(length) < lengths[:, None]


@given(st.integers(0, 99), st.sampled_from([0.1, 0.2, 0.4, 1.0]))
def test_the_highest_of_the_batch_and_of_each_row(seed: int, share: float) -> None:
    scores, mask = drawn(seed)
    junk = torch.where(mask, scores, torch.inf)
    batch = tw.top_entropy(junk, mask, share=share)
    threshold = np.quantile(scores[mask].numpy(), 1 - share)
    assert torch.equal(batch.bool(), mask & (scores >= threshold))
    rows = tw.top_of_row(junk, mask, share=share).bool()
    assert not bool((rows & ~mask).any())
    for row, kept, valid in zip(scores, rows, mask, strict=True):
        count = math.ceil(round(share * int(valid.sum()), 9))
        assert int(kept.sum()) == count
        assert bool((row[kept].min() >= row[valid & ~kept]).all())


def test_an_exact_share_is_not_rounded_up() -> None:
    """.4 times 5 is 2.0000000000000004 in some orders of evaluation; .07 times 100 is 7.000000000000001."""
    assert int(tw.top_of_row(torch.arange(5.0)[None], torch.ones(1, 5), share=0.4).sum()) == 2
    assert int(tw.top_of_row(torch.arange(100.0)[None], torch.ones(1, 100), share=0.07).sum()) == 7
    assert tw.top_of_row(torch.ones(1, 4), torch.ones(1, 4), share=0.5).tolist() == [[1.0, 1.0, 0.0, 0.0]]
    assert tw.top_entropy(torch.ones(1, 2), torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]


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
    found = tw.mismatch_weights(old, sampler, mask, level=level, low=1 / high, high=1 / low)
    assert torch.equal(found > 0, accepted) and 0 < int(accepted.sum()) < accepted.numel()
    same = tw.mismatch_weights(old, sampler, mask, level=level, low=low, high=high)
    assert not torch.equal(same > 0, accepted)


@given(st.integers(0, 99))
def test_no_mismatch_is_weight_one_and_bounds_hold(seed: int) -> None:
    old, mask = drawn(seed)
    sampler = old + 0.5 * torch.randn(old.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    for level in ("token", "sequence", "sequence_geo"):
        assert bool((tw.mismatch_weights(old, old, mask, level=level) == 1).all())
        truncated = tw.mismatch_weights(old, sampler, mask, level=level, mode="truncate", low=0.5, high=2.0)
        kept = tw.mismatch_weights(old, sampler, mask, level=level, mode="mask", low=0.5, high=2.0)
        assert bool((truncated >= 0.5).all()) and bool((truncated <= 2).all())
        assert bool(((kept == truncated) | (kept == 0)).all())
    token = tw.mismatch_weights(old, sampler, mask, level="token", mode="truncate", high=1e9)
    sequence = tw.mismatch_weights(old, sampler, mask, level="sequence", mode="truncate", high=1e9)
    geometric = tw.mismatch_weights(old, sampler, mask, level="sequence_geo", mode="truncate", high=1e9)
    assert torch.allclose(token.prod(dim=1, keepdim=True), sequence)
    assert torch.allclose(geometric ** mask.sum(dim=1, keepdim=True), sequence)


def test_unknown_levels_and_modes() -> None:
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="sequence_geo"):
        tw.mismatch_weights(ones, ones, ones, level="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="truncate"):
        tw.mismatch_weights(ones, ones, ones, mode="clip")  # type: ignore[arg-type]


def test_only_bad_rows_that_drifted_away_are_left_out() -> None:
    log_prob = torch.tensor([[-1.0, -1.0], [-3.0, -3.0], [-3.0, -3.0], [-3.0, torch.nan]])
    sampler = torch.full((4, 2), -1.0)
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    advantage = torch.tensor([-1.0, -1.0, 1.0, -1.0])
    keep = tw.off_policy_mask(log_prob, sampler, advantage, mask, threshold=1.0)
    assert keep.tolist() == [[1.0], [0.0], [1.0], [0.0]]
