"""GRPO-Guard: golden trainers_grpo_guard and its cases of samplers_kl_guard, and its properties.

Three peers, two forms. Ours is per sample and divided by the step size: Flow-Factory's ratio with the others' division.
The released loss of Flow-GRPO and PaCo-RL averages <(mu - mu_old)^2> over the batch; that is ours plus a known offset,
and is checked as such.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from genrl.diffusion.methods.flow_dppo.train import divergence_surrogate
from genrl.diffusion.methods.grpo_guard import train as guard
from genrl.mdp import noise
from genrl.objectives.surrogates.policy_losses import kl_gaussian
from tests.golden_cases import Arrays, Case, check_all, error

Errors = dict[str, tuple[float, float]]


def batch_offset(mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """What averaging the squared shift of the mean over the batch adds to each log-ratio."""
    shift = (mean - old_mean).square().flatten(1).mean(dim=1)
    return (shift.mean() - shift) / (2 * std.flatten())


def test_golden_losses_and_gradients(golden) -> None:
    """The peers' log-probability and mean are separate leaves; the network's gradient is the sum of both ways."""
    a = Arrays(golden("trainers_grpo_guard"), double=True)
    clip, bound = a.number("in_clip_range"), a.number("in_adv_clip_max")
    advantage, sigmas = a.given("in_advantage").clamp(-bound, bound), a.given("in_sigmas")
    names = ("next_latents", "old_mean", "new_mean")
    for k, (state, old, mean) in enumerate(zip(*(a.given(f"in_{name}").unbind(1) for name in names), strict=True)):
        delta = sigmas[k] - sigmas[k + 1]
        column = (len(state), *[1] * (state.dim() - 1))
        std = (a.given("in_std_dev_t")[k] * delta.sqrt()).expand(column)
        mean = mean.clone().requires_grad_()
        per_sample = guard.guard_log_ratio(state, mean, old, std)
        averaged = per_sample + batch_offset(mean, old, std)
        slope = (state - mean.detach()) / std**2 / mean[0].numel()  # of the element mean of the log-density
        for peer, log_ratio, divisor in (
            ("flow_grpo", averaged, delta),
            ("paco", averaged, delta),
            ("flow_factory", per_sample, torch.tensor(1.0)),
        ):
            out = guard.guard_surrogate(log_ratio, advantage, divisor, clip, clip)
            on_mean = torch.autograd.grad(out.loss.mean(), mean, retain_graph=True)[0]
            for found in a.matches(rf"out_{peer}_guard_(loss|ratio|grad_mean)"):
                want = a.given(found[0])[k] if found[1] == "loss" else a.given(found[0])[:, k]
                if found[1] == "grad_mean":
                    want = want + a.given(f"out_{peer}_guard_grad_logprob")[:, k].view(column) * slope
                    assert (on_mean - want).abs().max() <= 1e-5 * want.abs().max(), found[0]
                else:
                    assert error(out.loss.mean() if found[1] == "loss" else out.ratio, want) <= 1e-5, found[0]
    a.all_used("out_.*")


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
        if torch.equal(case["v_new"], case["v_old"]):
            assert (guard.guard_log_ratio(case["y"], case["mean_old"], case["mean_old"], std) == 0).all()
        ours = {
            "paco_guard_policy_loss": (policy, 2e-4),
            "paco_guard_loss": (policy + options["beta"] * case["paco_kl_loss"], 2e-4),
            "paco_guard_ratio_mean": (released.exp().mean(), 1e-6),
            "ff_ratio": (log_ratio.exp().expand(case["ff_ratio"].shape), 1e-6),
            "ff_scale": (std, 1e-6),
            "ff_mse": ((new - old).square().flatten(1).mean(dim=1), 1e-6),
        }
        return {name: (error(value, case[name]), tolerance) for name, (value, tolerance) in ours.items()}

    check_all(golden("samplers_kl_guard"), check, lambda case: case.params["kind"] != "grpo_guard")


def sample(seed: int, shape: tuple[int, ...] = (4, 3, 5)) -> dict[str, Tensor]:
    return {name: noise.keyed_noise(shape, seed, name).double() for name in ("state", "mean", "old")}


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


def test_golden_flow_dppo(golden) -> None:
    """UniRL's loss of every (sample, step), its KLs, what it leaves out, and its gradient."""
    a = Arrays(golden("flow_dppo"))
    new = a.given("new_logp").requires_grad_()
    old, advantage, threshold = a.given("old_logp"), a.given("advantages"), a.number("threshold")
    means, before, std = a.given("new_means"), a.given("old_means"), a.given("transition_std")
    moved = torch.stack([kl_gaussian(means[:, k], before[:, k], std[k].expand(len(means))[:, None, None, None])
                         for k in range(len(std))], 1)  # fmt: skip
    a.check("kl", moved)
    found = divergence_surrogate(new, old, advantage, moved, threshold=threshold)
    a.check("loss", found.loss.detach())
    a.check("keep", ~found.clipped)
    a.check("grad_new_logp", torch.autograd.grad(found.loss.mean(), new)[0])
    a.near("metric_masked_fraction", found.clipped.double().mean(), 1e-6)
    a.near("metric_kl_mask_fraction", (moved >= threshold).double().mean(), 1e-6)


def test_the_divergence_cuts_only_what_leads_further_away() -> None:
    """A = +-1, ratio above and below 1: of a step that has moved two of four are left out, of others none."""
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    log_ratio = torch.tensor([0.1, -0.1, 0.1, -0.1])
    for moved, cut in ((1.0, [True, False, False, True]), (0.0, [False] * 4)):
        found = divergence_surrogate(log_ratio, torch.zeros(4), advantage, torch.full((4,), moved), threshold=0.5)
        assert found.clipped.tolist() == cut
        want = torch.where(torch.tensor(cut), 0.0, -advantage * log_ratio.exp())
        torch.testing.assert_close(found.loss, want)
    big = divergence_surrogate(torch.tensor([200.0]), torch.zeros(1), torch.ones(1), torch.ones(1), threshold=0.5)
    assert float(big.loss) == 0  # an infinite ratio that is left out is no NaN
