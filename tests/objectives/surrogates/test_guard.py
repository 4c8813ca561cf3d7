"""GRPO-Guard: golden trainers_grpo_guard and its cases of samplers_kl_guard, and its properties.

Three peers, two forms. Ours is per sample and divided by the step size: Flow-Factory's ratio with the others' division.
The released loss of Flow-GRPO and PaCo-RL averages <(mu - mu_old)^2> over the batch; that is ours plus a known offset,
and is checked as such.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp import gaussian, noise
from genrl.objectives.surrogates import guard
from tests.golden_cases import Case, cases, error

Errors = dict[str, tuple[float, float]]


def batch_offset(mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """What averaging the squared shift of the mean over the batch adds to each log-ratio."""
    shift = (mean - old_mean).square().flatten(1).mean(dim=1)
    return (shift.mean() - shift) / (2 * std.flatten())


def test_golden_losses_and_gradients(golden) -> None:
    """The peers' log-probability and mean are separate leaves; the network's gradient is the sum of both ways."""
    data = golden("trainers_grpo_guard")
    arrays = {name: torch.from_numpy(data[name]).double() for name in data.files}
    clip, bound = float(arrays["in_clip_range"]), float(arrays["in_adv_clip_max"])
    advantage = arrays["in_advantage"].clamp(-bound, bound)
    batch, steps = arrays["in_old_log_prob"].shape
    compared = set()
    for k in range(steps):
        delta = arrays["in_sigmas"][k] - arrays["in_sigmas"][k + 1]
        state, old = arrays["in_next_latents"][:, k], arrays["in_old_mean"][:, k]
        column = (batch, *[1] * (state.dim() - 1))
        std = (arrays["in_std_dev_t"][k] * delta.sqrt()).expand(column)
        mean = arrays["in_new_mean"][:, k].clone().requires_grad_()
        per_sample = guard.guard_log_ratio(state, mean, old, std)
        averaged = per_sample + batch_offset(mean, old, std)
        # d (element mean of the log-density) / d mean
        slope = (state - mean.detach()) / std**2 / mean[0].numel()
        for peer, log_ratio, divisor in (
            ("flow_grpo", averaged, delta),
            ("paco", averaged, delta),
            ("flow_factory", per_sample, torch.tensor(1.0)),
        ):
            out = guard.guard_surrogate(log_ratio, advantage, divisor, clip, clip)
            on_mean = torch.autograd.grad(out.loss.mean(), mean, retain_graph=True)[0]
            ours = {"loss": out.loss.mean(), "ratio": out.ratio, "grad_mean": on_mean}
            for field, value in ours.items():
                name = f"out_{peer}_guard_{field}"
                if name not in arrays:
                    continue
                compared.add(name)
                want = arrays[name][k] if field == "loss" else arrays[name][:, k]
                if field == "grad_mean":
                    on_log_prob = f"out_{peer}_guard_grad_logprob"
                    compared.add(on_log_prob)
                    want = want + arrays[on_log_prob][:, k].view(column) * slope
                    assert (value - want).abs().max() <= 1e-5 * want.abs().max(), name
                else:
                    assert error(value, want) <= 1e-5, name
    assert compared == {name for name in arrays if name.startswith("out_")}


def test_golden_kl_guard_cases(golden) -> None:
    """The other fields of these cases are checked in test_policy_losses."""

    def check(case: Case) -> Errors:
        options = case.params
        delta = options["sigma"] - options["sigma_next"]
        std = (case["b"] * math.sqrt(delta)).double()
        bound, clip = options["adv_clip_max"], options["clip_range"]
        new, old = case["mean_new"].double(), case["mean_old"].double()
        log_ratio = guard.guard_log_ratio(case["y"].double(), new, old, std)
        released = log_ratio + batch_offset(new, old, std)
        advantage = case["adv"].double().clamp(-bound, bound)
        policy = guard.guard_surrogate(released, advantage, delta, clip, clip).loss.mean()
        shift = (new - old).square().flatten(1).mean(dim=1)
        ours = {
            "paco_guard_policy_loss": (policy, 2e-4),
            "paco_guard_loss": (policy + options["beta"] * case["paco_kl_loss"], 2e-4),
            "paco_guard_ratio_mean": (released.exp().mean(), 1e-6),
            "ff_ratio": (log_ratio.exp().expand(case["ff_ratio"].shape), 1e-6),
            "ff_scale": (std, 1e-6),
            "ff_mse": (shift, 1e-6),
        }
        elsewhere = {"adv", "b", "sigmas", "x", "y", "paco_kl_loss", "paco_ppo_loss", "paco_ppo_policy_loss"}
        elsewhere |= {f"{kind}_{which}" for kind in ("mean", "v", "logp") for which in ("new", "old", "ref")}
        assert set(case.arrays) <= ours.keys() | elsewhere and ours.keys() <= set(case.arrays)
        result = {name: (error(value, case[name]), tolerance) for name, (value, tolerance) in ours.items()}
        if torch.equal(case["v_new"], case["v_old"]):
            assert (guard.guard_log_ratio(case["y"], case["mean_old"], case["mean_old"], std) == 0).all()
        return result

    compared = 0
    for case in cases(golden("samplers_kl_guard")):
        if case.params["kind"] == "grpo_guard":
            compared += 1
            for name, (off, tolerance) in check(case).items():
                assert off <= tolerance, f"{case.id}: {name} is off by {off:.3g}"
    assert compared > 0


def sample(seed: int, shape: tuple[int, ...] = (4, 3, 5)) -> dict[str, Tensor]:
    return {name: noise.keyed_noise(shape, seed, name).double() for name in ("state", "mean", "old")}


@given(st.integers(0, 99), st.floats(0.01, 2.0))
def test_it_is_the_regulated_log_ratio(seed: int, std: float) -> None:
    """`s (l - l_old) + <(mu - mu_old)^2> / (2 s)`, without its cancellation."""
    s = sample(seed)
    stds = torch.full((4, 1, 1), std, dtype=torch.float64)
    new, old = (gaussian.log_prob(s["state"], s[name], stds) for name in ("mean", "old"))
    shift = (s["mean"] - s["old"]).square().flatten(1).mean(1)
    want = std * (new - old) + shift / (2 * std)
    assert torch.allclose(guard.guard_log_ratio(s["state"], s["mean"], s["old"], stds), want, rtol=1e-9, atol=1e-9)


def test_on_policy_the_ratio_is_exactly_one_and_the_loss_the_policy_gradient() -> None:
    state, old = noise.keyed_noise((4, 3, 5), "x"), noise.keyed_noise((4, 3, 5), "m")
    mean = old.clone().requires_grad_()
    advantage = torch.tensor([1.0, -2.0, 0.0, 0.5])
    out = guard.guard_surrogate(
        guard.guard_log_ratio(state, mean, old, torch.full((4, 1, 1), 0.3)), advantage, 0.1, 1e-6, 1e-6
    )
    assert (out.ratio == 1).all() and not out.clipped.any()
    assert torch.allclose(out.loss.detach(), -advantage / 0.1)
    out.loss.sum().backward()
    assert mean.grad is not None
    want = -advantage.view(-1, 1, 1) / 0.1 * (state - old) / 0.3 / 15
    assert torch.allclose(mean.grad, want, atol=1e-6)


def test_steps_may_differ_per_sample_and_gradient_flows_through_the_mean_only() -> None:
    leaves = [value.clone().requires_grad_() for value in sample(4).values()]
    std = torch.full((4, 1, 1), 0.5, dtype=torch.float64)
    log_ratio = guard.guard_log_ratio(*leaves, std)
    deltas = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    out = guard.guard_surrogate(log_ratio, torch.ones(4), deltas, 1e9, 1e9)
    assert torch.allclose(out.loss * deltas, -out.ratio)
    out.loss.sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [False, True, False]


def test_what_is_no_stochastic_step_is_refused() -> None:
    s = sample(6)
    with pytest.raises(ValueError, match="not an action"):
        guard.guard_log_ratio(s["state"], s["mean"], s["old"], torch.zeros(4, 1, 1))
    with pytest.raises(ValueError, match="delta must be positive"):
        guard.guard_surrogate(torch.zeros(4), torch.ones(4), -0.1, 1e-6, 1e-6)
