"""Masks, means and log-ratios of token sequences."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.objectives import token_regularisers as tr
from genrl.objectives import token_weights as tc
from genrl.objectives import tokens
from genrl.objectives.policy_losses import kl_k2, kl_k3
from genrl.objectives.token_advantages import whitened
from genrl.objectives.token_credit import semi_online_advantages, semi_online_returns
from genrl.objectives.token_surrogates import clip_surrogate
from genrl.objectives.tokens import aggregate, masked
from genrl.vlm.methods.music_rl.train import music_rl_loss
from genrl.vlm.methods.opd.train import gap_advantage, generalised_divergence, with_rest
from genrl.vlm.methods.rlfr.train import flow_returns, unlikely_tokens, velocity_deviation, velocity_error
from genrl.vlm.recipe import presets
from genrl.vlm.recipe.advantages import WhitenedReturns
from genrl.vlm.recipe.surrogates import Clip
from tests.golden_cases import Arrays

MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
VALUES = torch.tensor([[1.0, 3.0, float("nan")], [float("inf")] * 3, [2.0, 4.0, 9.0]])


def test_means_are_of_valid_tokens_and_log_ratios_have_their_gradient_in_the_new_policy_alone() -> None:
    """Empty rows give zero."""
    assert tokens.masked(VALUES, MASK).tolist() == [[1.0, 3.0, 0.0], [0.0] * 3, [2.0, 4.0, 9.0]]
    assert tokens.token_count(MASK).tolist() == [2, 0, 3]
    assert tokens.row_sum(VALUES, MASK).tolist() == [4.0, 0.0, 15.0]
    assert tokens.row_mean(VALUES, MASK).tolist() == [2.0, 0.0, 5.0]
    assert tokens.token_mean(VALUES, MASK) == 19.0 / 5
    assert tokens.token_mean(VALUES, torch.zeros_like(MASK)) == 0.0
    assert tokens.per_token(torch.arange(3.0), MASK).tolist() == [[0.0], [1.0], [2.0]]
    assert tokens.per_token(torch.ones(3, 1), MASK).shape == (3, 1)
    assert tokens.per_token(VALUES, MASK)[1].tolist() == [0.0] * 3
    new, old = VALUES.clone().requires_grad_(), VALUES.flip(0).clone().requires_grad_()
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 0]])
    assert tokens.log_ratio(new, old, mask).tolist() == [[-1.0, -1.0, 0.0], [0.0] * 3, [1.0, 1.0, 0.0]]
    assert tokens.sequence_log_ratio(new, old, mask).tolist() == [-2.0, 0.0, 2.0]
    mean = tokens.mean_log_ratio(new, old, mask)
    mean.sum().backward()
    assert mean.tolist() == [-1.0, 0.0, 1.0] and old.grad is None
    assert new.grad is not None and new.grad.tolist() == [[0.5, 0.5, 0.0], [0.0] * 3, [0.5, 0.5, 0.0]]


# -- Aggregation rules by hand, and which of them do not depend on micro-batches
TERM = torch.tensor([[1.0, 2.0, 3.0, 6.0], [4.0, torch.nan, torch.nan, torch.nan], [torch.nan] * 4])
MASK_TOKEN_AGGREGATION = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])


def test_by_hand() -> None:
    means = {"token_mean": 16 / 5, "token_mean_global": 16 / 5}
    wanted = means | {"seq_mean": (3 + 4 + 0) / 3, "const": 16 / (3 * 8), "seq_sum": 16 / 3}
    for rule, value in wanted.items():
        assert aggregate(TERM, MASK_TOKEN_AGGREGATION, rule, length=8).item() == pytest.approx(value), rule
    assert aggregate(TERM, MASK_TOKEN_AGGREGATION, "token_mean_global", tokens=8).item() == pytest.approx(2.0)
    # a term per row stands for each of its tokens; seq_sum is times the row's length: LUSPO
    term = torch.tensor([[2.0], [3.0], [torch.nan]])
    for rule, value in {"seq_mean": 5 / 3, "seq_sum": 11 / 3, "token_mean": 11 / 5}.items():
        assert aggregate(term, MASK_TOKEN_AGGREGATION, rule).item() == pytest.approx(value), rule
    term = torch.full((2, 3), torch.nan, requires_grad=True)
    for rule in wanted:  # nothing is valid
        loss = aggregate(term, torch.zeros(2, 3), rule, length=3)
        (gradient,) = torch.autograd.grad(loss, term)
        assert loss == 0 and bool((gradient == 0).all())


# -- Which tokens Clip-Cov and KL-Cov choose, against NumPy's covariance
def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 3])[:, None]
    old = torch.where(mask, 3.0 * torch.randn(4, 6, generator=generator), torch.nan)
    return old, torch.randn(4, generator=generator, dtype=torch.float64), mask


@given(st.integers(0, 99))
def test_the_mean_of_the_terms_is_the_covariance(seed: int) -> None:
    old, advantage, mask = random_case(seed)
    actual = tc.token_covariance(old, advantage, mask)
    by_token = advantage[:, None].expand(4, 6)
    wanted = np.cov(old[mask].double().numpy(), by_token[mask].numpy(), bias=True)[0, 1]
    assert np.isclose(float(actual[mask].mean()), wanted) and bool((actual[~mask] == 0).all())
    assert torch.equal(actual, tc.token_covariance(old, by_token, mask))


@given(st.integers(0, 99))
def test_kl_cov_takes_the_largest(seed: int) -> None:
    old, advantage, mask = random_case(seed)
    covariance = tc.token_covariance(old, advantage, mask)
    chosen = tc.kl_cov_tokens(covariance, mask, share=0.25)  # of 14 tokens: 3
    largest = np.sort(covariance[mask].numpy())[::-1]
    assert float(chosen.sum()) == 3 and np.allclose(np.sort(covariance[chosen.bool()].numpy())[::-1], largest[:3])
    assert float(tc.kl_cov_tokens(covariance, mask, share=1e-4).sum()) == 1  # the paper rounds down to none
    assert torch.equal(tc.kl_cov_tokens(covariance, mask, share=1.0), mask.double())


def test_clip_cov_takes_those_drawn_first_within_the_band() -> None:
    covariance = torch.tensor([[0.5, 1.5, 4.0, 6.0, 2.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    draw = torch.tensor([[0.0, 0.9, 0.2, 0.1, 0.5, 0.0]])
    assert tc.clip_cov_weight(covariance, draw, mask).tolist() == [[1, 1, 0, 1, 1, 1]]
    assert tc.clip_cov_weight(covariance, draw, mask, share=0.4).tolist() == [[1, 1, 0, 1, 0, 1]]
    assert tc.clip_cov_weight(covariance, draw, mask, low=7.0, high=8.0).tolist() == [[1] * 6]  # none in the band


# -- Distances of a student from a teacher: TRL's GKD and SDPO, ms-swift's advantages, and a table in closed form
def test_gkd(golden: Any) -> None:
    data = Arrays(golden("gkd"))
    student, kept = data.given("student_logits").requires_grad_(), data.given("labels") != -100
    for name in data.tags(r"loss_(beta.+)"):
        beta, temperature, *divided = name.removeprefix("beta").replace("_T", "_").split("_")
        rows = [(logits / float(temperature)).log_softmax(-1) for logits in (student, data.given("teacher_logits"))]
        far = generalised_divergence(*rows, float(beta))[kept]
        loss = far.sum() / int(divided[0].removeprefix("items")) if divided else far.mean()
        data.check(f"loss_{name}", loss.detach())
        if not divided:
            data.check(f"grad_{name}", torch.autograd.grad(loss, student)[0])
    data.all_used()


def test_whole_distributions_and_those_of_the_likeliest_tokens_with_the_rest(golden: Any) -> None:
    data = Arrays(golden("self_distillation"))
    student = data.given("student_logits").requires_grad_()
    log_p, log_t = student.log_softmax(-1), data.given("teacher_logits").log_softmax(-1)
    ids = log_p.topk(int(data.number("topk")), -1).indices
    some = [with_rest(rows.gather(-1, ids)) for rows in (log_p, log_t)]
    for name in data.tags(r"full_alpha(0|0\.5|1)"):
        for rows, key in (((log_p, log_t), f"full_alpha{name}"), (some, f"top_alpha{name}_tail")):
            actual = generalised_divergence(*rows, float(name))
            data.check(key, actual.detach())
            data.check(f"{key}_grad", torch.autograd.grad(actual.sum(), student, retain_graph=True)[0])
    data.all_used(r"(full|top)_.*", but=r".*renorm.*")  # renormalising over the likeliest is not offered


def test_the_gap_as_an_advantage(golden: Any) -> None:
    data = Arrays(golden("token_opd"))
    policy, teacher, mask = data.given("policy_logp"), data.given("teacher_logp"), data.given("mask")
    advantage = data.given("advantages")
    for coef in data.tags(r"per_token_advantage_coef(.+)"):
        ours = gap_advantage(advantage, policy, teacher, mask, coef=float(coef))
        data.check(f"per_token_advantage_coef{coef}", ours.expand(mask.shape))
    data.check("teacher_k3", masked(kl_k3(policy, teacher), mask))


# -- KL estimates, entropy, perception and value terms
@given(st.integers(0, 99))
def test_estimates_have_the_mean_they_estimate(seed: int) -> None:
    """Over all tokens with their probabilities, k1 and k3 are the exact KL; k2 has its gradient."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    rows, reference = logits.log_softmax(-1), torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    probability = rows.exp().detach()
    exact = tr.kl_categorical(rows, reference)
    for estimate in (tr.kl_k1, kl_k3):
        assert torch.allclose((probability * estimate(rows, reference)).sum(), exact)
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (k2,) = torch.autograd.grad((probability * kl_k2(rows, reference)).sum(), logits, retain_graph=True)
    (k1,) = torch.autograd.grad((probability * tr.kl_k1(rows, reference)).sum(), logits)
    assert torch.allclose(k2, wanted) and torch.allclose(k1, torch.zeros(6).double(), atol=1e-12)


@given(st.floats(-8, 8))
def test_the_clamped_estimate_is_k3_within_its_limits(difference: float) -> None:
    log_prob = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(-1.0 + difference, dtype=torch.float64)
    plain, clamped = kl_k3(log_prob, reference), tr.kl_k3_clamped(log_prob, reference)
    assert torch.allclose(clamped, plain.clamp(max=10.0))
    (gradient,) = torch.autograd.grad(clamped, log_prob)
    assert torch.allclose(gradient, torch.autograd.grad(plain, log_prob)[0]) if plain < 10 else gradient == 0

    assert tr.kl_k3_clamped(torch.tensor(-1e4), torch.tensor(0.0)) == 10.0
    assert tr.kl_k3_clamped(torch.tensor(0.0), torch.tensor(-1e4)) == 10.0


# -- MusicRL: its gradient is REINFORCE with a baseline and an exact KL (golden arrays: test_token_surrogates)
def test_masked_tokens_count_for_nothing_and_the_parts_have_their_own_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, requires_grad=True)
    reference = torch.randn(2, 3, 5, generator=generator).log_softmax(-1)
    value = torch.randn(2, 3, generator=generator, requires_grad=True)
    ids, mask = torch.tensor([[0, 4, 1], [2, 3, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    reward = torch.tensor([1.0, -1.0])
    output = music_rl_loss(logits.log_softmax(-1), reference, ids, reward, value, mask, alpha=0.2)
    assert torch.allclose(output.loss, -0.8 * output.policy + 0.2 * output.kl) and output.kl > 0
    assert torch.autograd.grad(output.loss, value, retain_graph=True, allow_unused=True)[0] is None
    (gradient,) = torch.autograd.grad(output.loss, logits, retain_graph=True)
    assert bool((gradient[1, 1:] == 0).all()) and bool((gradient[0] != 0).all())
    (to_value,) = torch.autograd.grad(output.value_loss, value)
    wanted = torch.where(mask.bool(), -2 * (reward[:, None] - value.detach()) / 4, 0.0)
    assert torch.allclose(to_value, wanted)


# -- RLFR's flow rewards: the velocity error of known fields, and what tokens are charged, by hand
def test_the_velocity_of_one_point_has_no_error_and_a_shifted_one_that_of_the_shift() -> None:
    """All data at c: x_t = t c + (1 - t) n, so that the velocity c - n is (c - x_t) / (1 - t)."""
    torch.manual_seed(0)
    c, noise, t = torch.tensor([0.5, -2.0, 1.0]), torch.randn(6, 3), torch.linspace(0.1, 0.9, 6)
    data = c.expand(6, 3)
    exact = velocity_error(lambda x, t: (c - x) / (1 - t[:, None]), data, noise, t)
    assert float(exact.max()) < 1e-10
    shifted = velocity_error(lambda x, t: (c - x) / (1 - t[:, None]) + torch.tensor([3.0, 0.0, 0.0]), data, noise, t)
    torch.testing.assert_close(shifted, torch.full((6,), 3.0))  # 9 / 3 dimensions
    still = velocity_error(lambda x, t: torch.zeros_like(x), data, noise, t)
    torch.testing.assert_close(still, (data - noise).square().mean(1))
    one = velocity_deviation(lambda x, t: x, torch.ones(1, 2), torch.zeros(1, 2), (0.5, 0.8))  # v = t, off by 1 - t
    assert float(one.error) == pytest.approx((0.25 + 0.04) / 2)
    assert float(one.score) == pytest.approx((1 * 0.25 + 4 * 0.04) / 2)  # times weigh t / (1 - t)


def test_charges_by_hand() -> None:
    score = torch.tensor([[1.0, 5.0, 4.5, 3.0, 99.0], [2.0, 2.0, 2.0, 7.0, 7.0], [0.0, 10.0, 9.0, 8.0, 7.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    actual = unlikely_tokens(score, mask, threshold=0.6, most=2)
    wanted = [[0, 1.0, 0.875, 0, 0], [0] * 5, [0, 1.0, 0.9, 0, 0]]
    assert actual.tolist() == wanted
    every = unlikely_tokens(score, mask, threshold=0.6, most=None)
    assert every[2].tolist() == [0, 1.0, 0.9, 0.8, 0.7] and torch.equal(every[:2], actual[:2])
    for odd in (torch.nan, torch.inf, -torch.inf):  # what is masked does not matter
        assert torch.equal(unlikely_tokens(score.where(mask > 0, odd), mask, threshold=0.6, most=2), actual)
    paid = flow_returns(actual, mask, coefficient=0.5)
    torch.testing.assert_close(paid[0], torch.tensor([-0.9375, -0.9375, -0.4375, 0, 0], dtype=torch.float64))
    assert (paid[1] == 0).all()


# -- UI-S1's credit against loops over the formulas
NAN = float("nan")


def test_a_turn_gets_what_follows_up_to_the_next_mismatch_and_step_and_episode_have_their_own_weight() -> None:
    rewards = torch.tensor([[1.0, 0.1, 1.0, 1.0], [1.0, 1.0, 0.5, NAN]])
    matched = torch.tensor([[True, False, True, True], [True, True, False, False]])
    wanted = [[1.0, 0.1, 1.5, 1.0], [1.5, 1.0, 0.5, NAN]]
    actual = semi_online_returns(rewards, matched, gamma=0.5)
    torch.testing.assert_close(actual, torch.tensor(wanted, dtype=torch.float64), equal_nan=True)
    # each part by itself, and what is made of both; its value in a run: tests/vlm/methods/episodes/test_archer.py
    rewards = torch.tensor([[1.0, 0.1], [0.5, 1.0], [0.1, NAN]], dtype=torch.float64)
    arguments = (rewards, rewards > 0.4, torch.zeros(3, dtype=torch.int64))
    episodes, steps, both = (
        semi_online_advantages(*arguments, gamma=0.9, episode=episode, step=step)
        for episode, step in ((1.0, 0.0), (0.0, 1.0), (0.7, 2.0))
    )
    torch.testing.assert_close(both, 0.7 * episodes + 2.0 * steps)
    assert episodes.abs().max() > 0.5 < steps.abs().max()


def test_episodes_weigh_the_same_whatever_their_length() -> None:
    """UI-S1's paper; its code takes mean and deviation over all turns: here (1 + 3 3) / 4 and 1, so -1.5 and .5."""
    rewards = torch.tensor([[1.0, NAN, NAN], [1.0, 1.0, 1.0]], dtype=torch.float64)
    actual = semi_online_advantages(rewards, rewards > 0, torch.tensor([0, 0]), gamma=0.5, episode=1.0, step=0.0)
    wanted = torch.tensor([[-1.0, 0, 0], [1.0, 1, 1]], dtype=torch.float64) / 2**0.5
    torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=0)


def test_just_grpo_is_the_mean_of_each_answers_own_tokens() -> None:
    """Its code divides by all places and by the answers whose advantage is not 0: the same gradient but for a factor,
    where answers are equally long, and another one where they are not."""
    recipe = presets.PRESETS["just_grpo"]
    assert recipe.surrogate == Clip(low=0.2, high=0.2)
    advantage = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    for lengths, same in (([4, 4, 4, 4], True), ([1, 4, 2, 3], False)):
        mask = torch.arange(4)[None] < torch.tensor(lengths)[:, None]
        log_prob = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        terms = clip_surrogate(log_prob, log_prob.detach(), advantage, mask, low=0.2, high=0.2)
        (ours,) = torch.autograd.grad(aggregate(terms.loss, mask, recipe.aggregation), log_prob)
        theirs = -advantage[:, None].expand(4, 4) / 4 / 2  # every place, two answers that teach
        assert torch.allclose(ours * 2, theirs) == same


def test_dcpo_does_not_grow_with_the_batch_and_reinforce_pp_takes_the_unbiased_variance() -> None:
    """As their programs have it: a mean over all tokens, not the paper's sum of the answers' means; N - 1 tokens."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    terms = torch.tensor([[1.0, 2.0, 3.0], [6.0, 0.0, 0.0]], dtype=torch.float64)
    rule = presets.PRESETS["dcpo"].aggregation
    assert aggregate(terms, mask, rule) == aggregate(terms.repeat(2, 1), mask.repeat(2, 1), rule) == 3.0
    recipe = presets.PRESETS["reinforce_pp"].advantage
    assert isinstance(recipe, WhitenedReturns) and recipe.ddof == 1 and recipe.eps < 1e-6
    scores = whitened(torch.tensor([[1.0], [2.0], [3.0]]), torch.ones(3, 1), eps=0.0)
    torch.testing.assert_close(scores, torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64))
