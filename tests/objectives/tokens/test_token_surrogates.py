"""Surrogates of token policies: on-policy gradients, clips, what is masked."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.objectives import token_advantages
from genrl.objectives import token_surrogates as ts
from genrl.objectives.policy_losses import SurrogateOutput
from genrl.objectives.tokens import aggregate
from tests.objectives.tokens.golden_tokens import Case, Expected, compare, with_gradient

PER_TOKEN = {
    "clip": ts.clip_surrogate,
    "dual": partial(ts.clip_surrogate, dual=1.5),
    "drop_above": partial(ts.clip_surrogate, drop_above=1.5),
    "log_clamp": ts.log_clamp_surrogate,
    "dynamic": ts.dynamic_clip_surrogate,
    "kl_cov": partial(ts.kl_cov_surrogate, chosen=torch.ones(3, 5)),
    "sequence_token": ts.sequence_token_clip_surrogate,
    "cispo": ts.cispo_surrogate,
    "sapo": ts.sapo_surrogate,
    "reinforce": ts.reinforce_surrogate,
    "vespo": ts.vespo_surrogate,
}
ROWS = {"sequence": ts.sequence_clip_surrogate, "geometric_mean": ts.geometric_mean_surrogate}
EVERY = PER_TOKEN | ROWS
SEEDS = st.integers(0, 99)


def random_case(seed: int, drift: float = 0.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.randn(3, 5, generator=generator, dtype=torch.float64).abs() - 0.1
    new = old + drift * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
    advantage = torch.randn(3, generator=generator, dtype=torch.float64)
    return new.requires_grad_(), old, advantage, mask


def total(output: SurrogateOutput, mask: Tensor) -> Tensor:
    return torch.where(mask, output.loss.expand(mask.shape), 0.0).sum()


@pytest.mark.parametrize("name", sorted(PER_TOKEN))
@given(seed=SEEDS)
def test_on_policy_the_gradient_is_that_of_reinforce(name: str, seed: int) -> None:
    new, _, advantage, mask = random_case(seed)
    output = PER_TOKEN[name](new, new.detach(), advantage, mask)
    (gradient,) = torch.autograd.grad(total(output, mask), new)
    wanted = torch.where(mask, -advantage[:, None].expand(mask.shape), 0.0)
    assert torch.allclose(gradient, wanted) and not bool(output.clipped.any())
    assert torch.allclose(
        output.ratio[mask] if output.ratio.shape == mask.shape else output.ratio, torch.ones(1).double()
    )


@pytest.mark.parametrize("name", sorted(ROWS))
@given(seed=SEEDS)
def test_one_ratio_of_a_row_moves_its_mean_on_policy(name: str, seed: int) -> None:
    """For GMPO this is GRPO's gradient: that of the row's mean of -A l."""
    new, _, advantage, mask = random_case(seed)
    output = ROWS[name](new, new.detach(), advantage, mask)
    (gradient,) = torch.autograd.grad(output.loss.sum(), new)
    wanted = torch.where(mask, -advantage[:, None] / mask.sum(1, keepdim=True), 0.0)
    assert output.loss.shape == (3, 1) and torch.allclose(gradient, wanted)


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"sapo", "reinforce", "vespo", "cispo", "kl_cov"}))
@given(seed=SEEDS)
def test_what_is_marked_as_clipped_has_no_gradient_and_nothing_else(name: str, seed: int) -> None:
    new, old, advantage, mask = random_case(seed, drift=0.7)
    output = EVERY[name](new, old, advantage, mask)
    (gradient,) = torch.autograd.grad(total(output, mask), new)
    clipped = output.clipped.expand(mask.shape)
    assert bool((gradient[mask & clipped] == 0).all()) and bool((gradient[mask & ~clipped] != 0).all())


def row(*log_ratios: float) -> tuple[Tensor, Tensor, Tensor]:
    old = torch.full((1, len(log_ratios)), -2.0, dtype=torch.float64)
    return (old + torch.tensor([log_ratios])).requires_grad_(), old, torch.ones_like(old)


def test_the_cap_is_two_sided_and_above_the_clip_and_the_log_clamp_survives_what_overflows() -> None:
    new, old, mask = row(math.log(10), math.log(1.5))
    output = ts.clip_surrogate(new, old, torch.tensor([-1.0]), mask, cap=1.6)
    assert torch.allclose(output.loss, torch.tensor([[1.6, 1.5]]).double())
    new, old, mask = row(2000.0, -2000.0, 0.1)
    for advantage in (1.0, -1.0):
        output = ts.log_clamp_surrogate(new, old, torch.tensor([advantage]), mask)
        (gradient,) = torch.autograd.grad(output.loss.sum(), new)
        assert bool(output.loss.isfinite().all()) and gradient[0, :2].tolist() == [0.0, 0.0] and gradient[0, 2] != 0


def test_vespo_vanishes_on_both_sides() -> None:
    for far in (800.0, -800.0):
        new, old, mask = row(far, 0.0)
        assert ts.vespo_surrogate(new, old, torch.tensor([1.0]), mask).loss.abs().max() == 0


@given(SEEDS)
def test_gmpo_is_the_product_of_clipped_ratios_to_the_power_of_one_over_their_number(seed: int) -> None:
    """Written out. Its gradient on policy: above."""
    new, old, advantage, mask = random_case(seed, drift=0.5)
    wanted = 0.0
    for b in range(3):
        sign, product, length = math.copysign(1.0, advantage[b].item()), 1.0, int(mask[b].sum())
        for ratio in (new - old).detach()[b, :length].exp().tolist():
            clipped = min(max(ratio, math.exp(-0.4)), math.exp(0.4))
            product *= min(sign * ratio, sign * clipped) * sign  # PPO's minimum, for either sign
        wanted -= advantage[b].item() * product ** (1 / length)
    output = ts.geometric_mean_surrogate(new, old, advantage, mask)
    assert output.loss.shape == (3, 1) and float(output.loss.detach().sum()) == pytest.approx(wanted, rel=1e-12)


def test_kl_cov_holds_back_the_chosen_tokens_alone_and_cispo_says_whose_weight_is_bounded() -> None:
    new, old, mask = row(0.3, -0.3, 0.3)
    output = ts.kl_cov_surrogate(new, old, torch.tensor([2.0]), mask, torch.tensor([[1, 1, 0]]), beta=0.5)
    ratio = np.exp([0.3, -0.3, 0.3])
    wanted = -2.0 * ratio + 0.5 * np.array([0.3, 0.3, 0.0])
    assert output.loss.detach().numpy()[0] == pytest.approx(wanted)
    (gradient,) = torch.autograd.grad(output.loss.sum(), new)
    assert gradient.numpy()[0] == pytest.approx(-2.0 * ratio + 0.5 * np.array([1.0, -1.0, 0.0]))
    new, old, mask = row(math.log(20), math.log(0.1), 0.0)
    output = ts.cispo_surrogate(new, old, torch.tensor([2.0]), mask)
    assert output.clipped.tolist() == [[True, False, False]]


# -- Golden losses that no preset has; those of presets go through all of it in tests/vlm/methods/test_policy_loss.py
def verl_variants(case: Case) -> Expected:
    log_prob, mask = case.log_prob, case["mask"]
    arguments = (log_prob, case["old_logp"], case["adv"], mask)
    dual = ts.clip_surrogate(*arguments, high=0.28, dual=3.0).loss
    two_sided = ts.cispo_surrogate(*arguments, lowest=0.8, highest=1.28).loss
    plain = ts.clip_surrogate(*arguments).loss
    return (
        with_gradient(aggregate(dual, mask, "token_mean"), log_prob, "_dual_clip")
        | with_gradient(aggregate(two_sided, mask, "token_mean"), log_prob, "_cispo_two_sided")
        | with_gradient(aggregate(plain, mask, "seq_sum"), log_prob, "_seq_mean_token_sum")
    )


def stable_reinforce(case: Case) -> Expected:
    log_prob, mask, result = case.log_prob, case["mask"], {}
    for name in [name for name in case.arrays if name.startswith("out_loss_delta")]:
        delta = name.removeprefix("out_loss_delta")
        term = ts.log_clamp_surrogate(log_prob, case["old_logp"], case["adv"], mask, delta=float(delta))
        result |= with_gradient(aggregate(term.loss, mask, "seq_mean"), log_prob, f"_delta{delta}")
    scores = token_advantages.whitened(case["raw_adv"], mask, eps=0.0, ddof=0)
    return result | {"adv_3sigma": token_advantages.sigma_filtered(scores)}


@pytest.mark.parametrize("name, check", [("stable_reinforce", stable_reinforce), ("verl_variants", verl_variants)])
def test_golden(golden, name: str, check: Callable[[Case], Expected]) -> None:
    compare(golden(f"vlm_{name}"), check)
