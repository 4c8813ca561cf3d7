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

from genrl.objectives import token_advantages, token_credit, token_regularisers, token_surrogates, token_weights
from genrl.objectives import token_surrogates as masked_diffusion
from genrl.objectives import token_surrogates as ts
from genrl.objectives.groups import group_advantages
from genrl.objectives.policy_losses import SurrogateOutput, kl_k3
from genrl.objectives.tokens import aggregate, masked, mean_log_ratio, row_mean, sequence_log_ratio
from tests.objectives.tokens.golden_tokens import Case, Expected, compare, kl_term, with_gradient
from tests.reference.tokens import exact_loss

PER_TOKEN = {
    "clip": ts.clip_surrogate,
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


def drawn(seed: int, drift: float = 0.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    new, _, advantage, mask = drawn(seed)
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
    new, _, advantage, mask = drawn(seed)
    output = ROWS[name](new, new.detach(), advantage, mask)
    (gradient,) = torch.autograd.grad(output.loss.sum(), new)
    wanted = torch.where(mask, -advantage[:, None] / mask.sum(1, keepdim=True), 0.0)
    assert output.loss.shape == (3, 1) and torch.allclose(gradient, wanted)


@pytest.mark.parametrize("name", sorted(EVERY))
@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e30])
def test_masked_tokens_have_no_influence(name: str, junk: float) -> None:
    new, old, advantage, mask = drawn(1)
    clean = EVERY[name](new, old, advantage, mask)
    dirty_new = torch.where(mask, new.detach(), junk).requires_grad_()
    dirty = EVERY[name](dirty_new, torch.where(mask, old, -junk), advantage, mask)
    assert torch.equal(total(clean, mask), total(dirty, mask))
    (gradient,) = torch.autograd.grad(total(dirty, mask), dirty_new)
    assert torch.equal(gradient, torch.autograd.grad(total(clean, mask), new)[0])
    assert bool((gradient[~mask] == 0).all())


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"sapo", "reinforce", "vespo", "cispo", "kl_cov"}))
@given(seed=SEEDS)
def test_what_is_marked_as_clipped_has_no_gradient_and_nothing_else(name: str, seed: int) -> None:
    new, old, advantage, mask = drawn(seed, drift=0.7)
    output = EVERY[name](new, old, advantage, mask)
    (gradient,) = torch.autograd.grad(total(output, mask), new)
    clipped = output.clipped.expand(mask.shape)
    assert bool((gradient[mask & clipped] == 0).all()) and bool((gradient[mask & ~clipped] != 0).all())


def row(*log_ratios: float) -> tuple[Tensor, Tensor, Tensor]:
    old = torch.full((1, len(log_ratios)), -2.0, dtype=torch.float64)
    return (old + torch.tensor([log_ratios])).requires_grad_(), old, torch.ones_like(old)


def test_dual_clip_bounds_a_bad_token_that_became_likely() -> None:
    new, old, mask = row(math.log(10), math.log(2), math.log(1.1))
    output = ts.clip_surrogate(new, old, torch.tensor([-1.0]), mask, dual=3.0)
    assert torch.allclose(output.loss, torch.tensor([[3.0, 2.0, 1.1]]).double())
    assert output.clipped.tolist() == [[True, False, False]]
    (gradient,) = torch.autograd.grad(output.loss.sum(), new)
    assert torch.allclose(gradient, torch.tensor([[0.0, 2.0, 1.1]]).double())


def test_the_cap_is_two_sided_and_above_the_clip() -> None:
    new, old, mask = row(math.log(10), math.log(1.5))
    output = ts.clip_surrogate(new, old, torch.tensor([-1.0]), mask, cap=1.6)
    assert torch.allclose(output.loss, torch.tensor([[1.6, 1.5]]).double())
    with pytest.raises(ValueError, match="cap must be above 1 . high"):
        ts.clip_surrogate(new, old, torch.tensor([-1.0]), mask, cap=1.2)
    with pytest.raises(ValueError, match="must be above 1, got 1"):
        ts.clip_surrogate(new, old, torch.tensor([-1.0]), mask, dual=1.0)


def test_one_huge_ratio_leaves_the_whole_row_with_the_clipped_branch() -> None:
    new, old, mask = row(math.log(11), math.log(0.5), math.log(2.0), 0.0)
    output = ts.clip_surrogate(new, old, torch.tensor([-1.0]), mask, low=0.1, high=0.1, drop_above=10.0)
    assert torch.allclose(output.loss, torch.tensor([[1.1, 0.9, 1.1, 1.0]]).double())
    assert output.clipped.tolist() == [[True, True, True, False]]
    below = ts.clip_surrogate(new, old, torch.tensor([-1.0]), mask, low=0.1, high=0.1, drop_above=12.0)
    plain = ts.clip_surrogate(new, old, torch.tensor([-1.0]), mask, low=0.1, high=0.1)
    assert torch.equal(below.loss, plain.loss) and float(plain.loss[0, 0].detach()) == pytest.approx(11)


def test_the_log_clamp_survives_what_overflows() -> None:
    new, old, mask = row(2000.0, -2000.0, 0.1)
    for advantage in (1.0, -1.0):
        output = ts.log_clamp_surrogate(new, old, torch.tensor([advantage]), mask)
        (gradient,) = torch.autograd.grad(output.loss.sum(), new)
        assert bool(output.loss.isfinite().all()) and gradient[0, :2].tolist() == [0.0, 0.0] and gradient[0, 2] != 0
    with pytest.raises(ValueError, match="above 1"):
        ts.log_clamp_surrogate(new, old, torch.ones(1), mask, delta=1.0)


def test_vespo_weighs_by_the_sequence_and_vanishes_on_both_sides() -> None:
    new, old, mask = row(0.3, 0.2, -0.1)
    output = ts.vespo_surrogate(new, old, torch.tensor([1.0]), mask)
    weight = math.exp(0.4)
    phi = weight**2 * math.exp(3 * (1 - weight))
    (gradient,) = torch.autograd.grad(output.loss.sum(), new)
    assert torch.allclose(gradient, torch.full((1, 3), -phi).double())
    for far in (800.0, -800.0):
        new, old, mask = row(far, 0.0)
        assert ts.vespo_surrogate(new, old, torch.tensor([1.0]), mask).loss.abs().max() == 0


def test_a_ratio_per_row_needs_an_advantage_per_row() -> None:
    new, old, mask = row(0.1, 0.2)
    for surrogate in (ts.sequence_clip_surrogate, ts.vespo_surrogate):
        with pytest.raises(ValueError, match=r"per row \[B\], got \[1, 2\]"):
            surrogate(new, old, torch.ones(1, 2), mask)


@given(SEEDS)
def test_gmpo_is_the_product_of_clipped_ratios_to_the_power_of_one_over_their_number(seed: int) -> None:
    """Written out in NumPy, with the gradient by central differences."""
    new, old, advantage, mask = drawn(seed, drift=0.5)

    def loss(values: np.ndarray) -> float:
        total = 0.0
        for b in range(3):
            sign, product, length = np.sign(advantage[b].item()), 1.0, int(mask[b].sum())
            for t in range(length):
                ratio = math.exp(values[b, t] - old[b, t].item())
                clipped = min(max(ratio, math.exp(-0.4)), math.exp(0.4))
                product *= min(sign * ratio, sign * clipped) * sign  # PPO's minimum, for either sign
            total -= advantage[b].item() * product ** (1 / length)
        return total

    output = ts.geometric_mean_surrogate(new, old, advantage, mask)
    values = new.detach().numpy()
    assert output.loss.shape == (3, 1) and float(output.loss.detach().sum()) == pytest.approx(loss(values), rel=1e-12)
    (gradient,) = torch.autograd.grad(output.loss.sum(), new)
    near = ((new - old).abs() - 0.4).abs().detach() < 1e-4  # on the clip's corner there is no derivative
    for b, t in (mask & ~near).nonzero().tolist():
        step = np.zeros_like(values)
        step[b, t] = 1e-6
        slope = (loss(values + step) - loss(values - step)) / 2e-6
        assert gradient[b, t].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_gmpo_needs_one_advantage_per_row() -> None:
    new, old, mask = row(0.1, 0.2)
    with pytest.raises(ValueError, match="one advantage per row"):
        ts.geometric_mean_surrogate(new, old, torch.ones(1, 2), mask)


def test_kl_cov_holds_back_the_chosen_tokens_alone() -> None:
    new, old, mask = row(0.3, -0.3, 0.3)
    output = ts.kl_cov_surrogate(new, old, torch.tensor([2.0]), mask, torch.tensor([[1, 1, 0]]), beta=0.5)
    ratio = np.exp([0.3, -0.3, 0.3])
    wanted = -2.0 * ratio + 0.5 * np.array([0.3, 0.3, 0.0])
    assert output.loss.detach().numpy()[0] == pytest.approx(wanted)
    (gradient,) = torch.autograd.grad(output.loss.sum(), new)
    assert gradient.numpy()[0] == pytest.approx(-2.0 * ratio + 0.5 * np.array([1.0, -1.0, 0.0]))


@given(st.floats(0.01, 0.99))
def test_dynamic_bounds_are_wider_for_rare_tokens(probability: float) -> None:
    q = torch.tensor([probability, probability / 2], dtype=torch.float64)
    low, high = ts.dynamic_clip_bounds(q.log())
    assert high[1] >= high[0] > 1 and low[1] <= low[0] < 1
    assert bool((low >= 0.5).all()) and bool((high <= 10).all())
    # the bound solves |rho - 1| rho q = width: the change of probability is bounded, not the ratio
    free = high < 10
    assert torch.allclose(((high - 1) * high * q)[free], torch.tensor(0.2).double())


def test_cispo_keeps_every_gradient_and_bounds_its_weight() -> None:
    new, old, mask = row(math.log(20), math.log(0.1), 0.0)
    output = ts.cispo_surrogate(new, old, torch.tensor([2.0]), mask)
    (gradient,) = torch.autograd.grad(output.loss.sum(), new)
    assert torch.allclose(gradient, -2 * torch.tensor([[5.0, 0.1, 1.0]]).double())
    assert output.clipped.tolist() == [[True, False, False]]


# -- The golden losses of token policies: every `vlm_*` file but those of advantages (test_advantage_golden). A case
# or an expected array that nothing compares is a failure, so that none can be forgotten


def trl_loss(case: Case) -> Expected:
    """TRL's loss types: surrogates x aggregations x per-token KL."""
    params, mask, log_prob = case.params, case["mask"], case.log_prob
    arguments = (log_prob, case["old_logp"], case["adv"], mask)
    low, high = params.get("eps_low", 0.2), params.get("eps_high", 0.2)
    kind = params["loss_type"]
    if kind == "cispo":
        loss = token_surrogates.cispo_surrogate(*arguments, highest=high).loss
    elif kind == "sapo":
        loss = token_surrogates.sapo_surrogate(
            *arguments, positive=params.get("tp", 1.0), negative=params.get("tn", 1.05)
        ).loss
    elif kind == "vespo":
        loss = token_surrogates.vespo_surrogate(*arguments).loss
    elif params.get("level") == "sequence":
        loss = token_surrogates.sequence_clip_surrogate(*arguments, low=low, high=high).loss
    else:
        loss = token_surrogates.clip_surrogate(*arguments, low=low, high=high, cap=params.get("delta")).loss
    rule = {"grpo": "seq_mean", "sapo": "seq_mean", "bnpo": "token_mean", "dr_grpo": "const", "luspo": "seq_sum"}
    total = aggregate(
        loss + kl_term(case, log_prob),
        mask,
        rule.get(kind, "token_mean_global"),
        tokens=int(params["num_items"]),
        length=params.get("maxlen", 16),
    )
    return with_gradient(total, log_prob)


def gspo_token(case: Case) -> Expected:
    log_prob, params = case.log_prob, case.params
    term = token_surrogates.sequence_token_clip_surrogate(
        log_prob, case["old_logp"], case["adv"], case["mask"], low=params["lo"], high=params["hi"]
    )
    return with_gradient(aggregate(term.loss, case["mask"], "seq_mean"), log_prob)


def mismatch(case: Case) -> Expected:
    log_prob, mask = case.log_prob, case["mask"]
    arguments, result = (log_prob, case["old_logp"], case["adv"], mask), {}
    corrected = token_surrogates.clip_surrogate(*arguments, low=0.2, high=0.28).loss
    for level in ("token", "sequence"):
        for mode in ("truncate", "mask"):
            weights = token_weights.mismatch_weights(
                case["old_logp"], case["sampler_logp"], mask, level=level, mode=mode, low=0.5, high=2.0
            )
            result[f"w_{level}_{mode}"] = weights
            loss = aggregate(weights * corrected, mask, "token_mean")
            result |= with_gradient(loss, log_prob, f"_{level}_{mode}")
    plain = token_surrogates.clip_surrogate(*arguments).loss
    keep = token_weights.off_policy_mask(
        log_prob, case["sampler_logp"], case["adv"], mask, threshold=case.number("opsm_threshold")
    )
    result["opsm_keep"] = keep[:, 0]
    result |= with_gradient(aggregate(keep * plain, mask, "token_mean"), log_prob, "_opsm")
    forking = token_weights.top_entropy(case["entropy"], mask, share=0.2)
    result["entropy_mask"] = forking.bool()
    return result | with_gradient(aggregate(forking * plain, mask, "token_mean"), log_prob, "_top20")


def verl_variants(case: Case) -> Expected:
    log_prob, mask = case.log_prob, case["mask"]
    arguments = (log_prob, case["old_logp"], case["adv"], mask)
    dual = token_surrogates.clip_surrogate(*arguments, high=0.28, dual=3.0).loss
    two_sided = token_surrogates.cispo_surrogate(*arguments, lowest=0.8, highest=1.28).loss
    plain = token_surrogates.clip_surrogate(*arguments).loss
    return (
        with_gradient(aggregate(dual, mask, "token_mean"), log_prob, "_dual_clip")
        | with_gradient(aggregate(two_sided, mask, "token_mean"), log_prob, "_cispo_two_sided")
        | with_gradient(aggregate(plain, mask, "seq_sum"), log_prob, "_seq_mean_token_sum")
    )


def dcpo_clip(case: Case) -> Expected:
    log_prob, mask = case.log_prob, case["mask"]
    widths = {"low": case.number("eps_low"), "high": case.number("eps_high")}
    low, high = token_surrogates.dynamic_clip_bounds(case["old_logp"], **widths)
    term = token_surrogates.dynamic_clip_surrogate(log_prob, case["old_logp"], case["adv"], mask, **widths)
    # the bounds are compared where the mask is 1; elsewhere ours are NaN, as the inputs are
    bounds = {name: torch.where(mask.bool(), v, case[f"out_{name}"]) for name, v in (("low", low), ("high", high))}
    return bounds | with_gradient(aggregate(term.loss, mask, "seq_mean", rows=1), log_prob, "_otm")


def vppo(case: Case) -> Expected:
    params, mask, log_prob = case.params, case["mask"], case.log_prob
    dependency = token_weights.visual_dependency(case["old_logp"], case["masked_image_logp"], mask)
    chosen = token_weights.top_of_row(dependency, mask, share=params["top_p"])
    weight = token_advantages.trajectory_weight(dependency, mask, minimum=params["scale_min"])
    advantage = token_advantages.scaled(case["adv"], weight, mask)
    term = token_surrogates.clip_surrogate(
        log_prob,
        case["old_logp"],
        advantage,
        mask,
        low=params["eps_low"],
        high=params["eps_high"],
        dual=params["dual_clip"],
    )
    return {
        "dependency": dependency,
        "token_mask": chosen,
        "traj_score": row_mean(dependency, mask),
        "traj_weight": weight,
    } | with_gradient(aggregate(chosen * term.loss, mask, "token_mean"), log_prob)


def tw_grpo(case: Case) -> Expected:
    mask, log_prob, group = case["mask"], case.log_prob, case.group_of("adv")
    rows = torch.where(mask.bool()[..., None], case["full_logp"], torch.nan)
    # in two pieces: positions are independent
    divergence = torch.cat(
        [token_weights.group_divergence(rows[:, part], mask[:, part], group) for part in (slice(0, 3), slice(3, None))],
        dim=1,
    )
    weights = token_weights.divergence_weights(divergence, mask, group, alpha=case.number("alpha"))
    term = token_surrogates.clip_surrogate(log_prob, case["old_logp"], case["adv"], mask)
    loss = aggregate(weights * term.loss, mask, "token_mean")
    return {"kl_per_position": divergence, "weights": weights} | with_gradient(loss, log_prob)


def reg_grpo(case: Case) -> Expected:
    params, log_prob, mask = case.params, case.log_prob, case["mask"]
    advantage = group_advantages(case["rewards"], case.group, scale="group", eps=params["adv_eps"], ddof=1)
    score = sequence_log_ratio(log_prob, case["old_logp"], mask)
    loss = token_surrogates.regression_loss(score, advantage, case.group, eps=params["eps_sigma"]).mean()
    if params["beta"]:
        loss = loss + aggregate(kl_term(case, log_prob), mask, "seq_mean")
    return {"adv": advantage} | with_gradient(loss, log_prob)


def real(case: Case) -> Expected:
    log_prob = case.log_prob
    positive = group_advantages(case["rewards"], case.group, scale="none") > 0
    score = mean_log_ratio(log_prob, case["old_logp"], case["mask"])
    loss = token_surrogates.classification_loss(score, positive, case.group, tau=case.number("tau")).mean()
    return with_gradient(loss, log_prob)


def stable_reinforce(case: Case) -> Expected:
    log_prob, mask, result = case.log_prob, case["mask"], {}
    for name in [name for name in case.arrays if name.startswith("out_loss_delta")]:
        delta = name.removeprefix("out_loss_delta")
        term = token_surrogates.log_clamp_surrogate(log_prob, case["old_logp"], case["adv"], mask, delta=float(delta))
        result |= with_gradient(aggregate(term.loss, mask, "seq_mean"), log_prob, f"_delta{delta}")
    scores = token_advantages.whitened(case["raw_adv"], mask, eps=0.0, ddof=0)
    return result | {"adv_3sigma": token_advantages.sigma_filtered(scores)}


def bgpo(case: Case) -> Expected:
    elbo = case["elbo_samples"].requires_grad_()
    arguments = (elbo, case["old_elbo_samples"], case["adv"])
    bound = with_gradient(masked_diffusion.linear_bound_loss(*arguments).mean(), elbo)
    exact = with_gradient(exact_loss(*arguments).mean(), elbo)
    return bound | {f"exact_{name}": value for name, value in exact.items()}


def vldac(case: Case) -> Expected:
    params, log_prob, mask = case.params, case.log_prob, case["mask"]
    credit = token_credit.step_gae(
        case["rewards"],
        case["values"],
        case["done"],
        case["truncated"],
        case["last_value"],
        gamma=case.number("gamma"),
        lam=case.number("lam"),
    )
    advantage = token_advantages.batch_normalised(credit.advantages)
    clip = params["clip"]
    term = token_surrogates.clip_surrogate(
        log_prob, case["old_logp"], advantage, mask, low=clip, high=clip, drop_above=10.0
    )
    kl = kl_k3(masked(log_prob, mask), masked(case["ref_logp"], mask))
    loss = aggregate(term.loss + params["kl_beta"] * kl, mask, "seq_mean")
    value = token_regularisers.clipped_value_loss(case["new_values"], case["values"], credit.returns, clip=clip)
    policy = with_gradient(loss, log_prob)
    return {
        "returns": credit.returns,
        "adv_norm": advantage,
        "policy_loss": policy["loss"],
        "policy_grad": policy["grad"],
        "value_loss": params["value_coef"] * value.mean(),
    }


TRL = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "gspo", "luspo", "sapo", "vespo")
OTHERS: dict[str, Callable[[Case], Expected]] = {
    "bgpo": bgpo,
    "dcpo_clip": dcpo_clip,
    "gspo_token": gspo_token,
    "mismatch": mismatch,
    "real": real,
    "reg_grpo": reg_grpo,
    "stable_reinforce": stable_reinforce,
    "tw_grpo": tw_grpo,
    "verl_variants": verl_variants,
    "vldac": vldac,
    "vppo": vppo,
}


@pytest.mark.parametrize("name", [*TRL, *OTHERS])
def test_golden(golden, name: str) -> None:
    compare(golden(f"vlm_{name}"), OTHERS.get(name, trl_loss))
