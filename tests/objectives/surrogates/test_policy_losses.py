"""The clipped surrogate and the reference KLs: golden trainers_grpo_loss and samplers_kl_guard, and properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.diffusion.methods.flow_dppo.train import divergence_surrogate
from genrl.diffusion.methods.grpo_guard import train as guard
from genrl.mdp import kernels, noise
from genrl.objectives import policy_losses
from genrl.objectives.policy_losses import kl_gaussian
from tests.golden_cases import Arrays, Case, check_all, error, relative_error, through

Errors = dict[str, tuple[float, float]]


def test_golden_losses_and_gradients(golden) -> None:
    """One loss per timestep, [samples, timesteps]; the log-probability and the mean are separate leaves."""
    a = Arrays(golden("trainers_grpo_loss"))
    clip, bound = a.number("in_clip_range"), a.number("in_adv_clip_max")
    advantage = a.given("in_advantage").clamp(-bound, bound)[:, None]
    sigmas, coefficient, reference = (a.given(f"in_{name}") for name in ("sigmas", "std_dev_t", "ref_mean"))
    log_prob, mean = a.given("in_new_log_prob").requires_grad_(), a.given("in_new_mean").requires_grad_()
    surrogate = policy_losses.clipped_surrogate(log_prob, a.given("in_old_log_prob"), advantage, clip, clip)
    policy = surrogate.loss.mean(dim=0)
    a.near("out_flow_grpo_ratio", surrogate.ratio)
    per_step: dict[str, list[Tensor]] = {"flow_grpo": [], "paco_ppo": [], "flow_factory": []}
    for k in range(mean.shape[1]):
        delta = sigmas[k] - sigmas[k + 1]
        std = (coefficient[k] * delta.sqrt()).expand(len(mean), *[1] * (mean.dim() - 2))
        pair = mean[:, k], reference[:, k]
        per_step["flow_grpo"].append(policy_losses.kl_gaussian_dt(*pair, std, delta).mean())
        per_step["paco_ppo"].append(policy_losses.kl_gaussian_dt(*pair, std, delta, eps=1e-7).mean())
        per_step["flow_factory"].append(policy_losses.kl_mean_square(*pair).mean())
        exact = policy_losses.kl_gaussian(*pair, std).mean()
        assert relative_error(per_step["flow_grpo"][-1], delta * exact) < 1e-5
    for peer, kls in per_step.items():
        for suffix, loss in (("nokl", policy), ("kl", policy + a.number("in_kl_beta") * torch.stack(kls))):
            gradients = torch.autograd.grad(loss.sum(), (log_prob, mean), retain_graph=True, allow_unused=True)
            ours = dict(zip(("loss", "grad_logprob", "grad_mean"), (loss, *gradients), strict=True))
            for actual in a.matches(rf"out_{peer}_(loss|grad_logprob|grad_mean)(_{suffix})?"):
                if actual[2] or actual[1] == "grad_logprob":
                    a.near(actual[0], ours[actual[1]])
    a.all_used("out_.*")


def test_golden_kls(golden) -> None:
    def flow_sde(case: Case, velocity: str) -> kernels.Transition:
        options, double = case.params, torch.float64
        at = case["x"].to(double), case[velocity].to(double), options["sigma"], options["sigma_next"]
        clamp = case["sigmas"][1].item()
        return kernels.flow_sde(*at, noise_level=options["noise_level"], sigma_max=clamp)

    def check(case: Case) -> Errors:
        if case.params["kind"] == "kl_ff":
            moved = policy_losses.kl_velocity(case["v_new"], case["v_ref"]).mean()
            means = policy_losses.kl_mean_square(case["mean_new"], case["mean_ref"]).mean()
            return {
                "v_based": (relative_error(moved, case["kl_v_based"]), 1e-5),
                "x_based": (relative_error(means, case["kl_x_based"]), 1e-5),
            }
        new, old, reference = (flow_sde(case, f"v_{name}") for name in ("new", "old", "ref"))
        delta = case.params["sigma"] - case.params["sigma_next"]
        std = case["b"] * math.sqrt(delta)
        result: Errors = {}
        for name, step in (("new", new), ("old", old), ("ref", reference)):
            result[f"mean_{name}"] = error(step.mean, case[f"mean_{name}"]), 2e-6
            if f"logp_{name}" in case:
                density = kernels.log_prob(case["y"], step.mean, step.std)
                result[f"logp_{name}"] = error(density, case[f"logp_{name}"]), through(step.std)
        if case.params["kind"] == "grpo_guard":
            return result | paco_losses(case, std, delta)
        with_dt = policy_losses.kl_gaussian_dt(case["mean_new"], case["mean_ref"], std, delta)
        plain = policy_losses.kl_mean_square(case["mean_new"], case["mean_ref"])
        exact = policy_losses.kl_gaussian(new.mean, reference.mean, new.std)
        of_means = policy_losses.kl_gaussian(case["mean_new"].double(), case["mean_ref"].double(), std.double())
        return result | {
            "kl_flow_grpo": (relative_error(with_dt.mean(), case["kl_flow_grpo"]), 1e-5),
            "kl_flow_grpo_per_sample": (relative_error(with_dt, case["kl_flow_grpo_per_sample"].flatten()), 1e-5),
            "kl_adv_grpo": (relative_error(plain.mean(), case["kl_adv_grpo"]), 1e-5),
            "kl_adv_grpo_per_sample": (relative_error(plain, case["kl_adv_grpo_per_sample"].flatten()), 1e-5),
            "exact_from_velocity": (relative_error(exact, case["exact_kl_from_velocity"]), 1e-5),
            "exact_per_dim": (relative_error(of_means, case["exact_kl_per_dim"]), 1e-5),
        }

    def paco_losses(case: Case, std: Tensor, delta: float) -> Errors:
        """PaCo-RL's plain loss. GRPO-Guard's, of all peers, is compared below."""
        options = case.params
        kl = policy_losses.kl_gaussian_dt(case["mean_new"], case["mean_ref"], std, delta, eps=1e-7).mean()
        clip, bound = options["clip_range"], options["adv_clip_max"]
        advantage = case["adv"].clamp(-bound, bound)
        surrogate = policy_losses.clipped_surrogate(case["logp_new"], case["logp_old"], advantage, clip, clip)
        policy = surrogate.loss.mean()
        if torch.equal(case["v_new"], case["v_old"]):
            assert (surrogate.ratio == 1).all() and not surrogate.clipped.any()
        return {
            "paco_kl": (relative_error(kl, case["paco_kl_loss"]), 1e-5),
            "paco_policy": (error(policy, case["paco_ppo_policy_loss"]), 2e-4),
            "paco_loss": (error(policy + options["beta"] * kl, case["paco_ppo_loss"]), 2e-4),
        }

    check_all(golden("samplers_kl_guard"), check)


# The surrogate -------------------------------------------------------------------------------------------------------
def scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_ratio_beyond_float32_does_not_make_what_has_no_gradient_nan(weight: float) -> None:
    """A sample left out (weight 0) adds 0, a clipped one its bound; what does have a gradient is infinite."""
    log_prob = torch.tensor([200.0, 0.0], requires_grad=True)
    out = policy_losses.clipped_surrogate(log_prob, torch.zeros(2), torch.tensor([weight, 1.0]), 0.2, 0.2)
    out.loss.sum().backward()
    assert out.loss.tolist() == pytest.approx([-1.2 * weight, -1.0])
    assert log_prob.grad is not None and log_prob.grad.tolist() == [0.0, -1.0]
    pushed_down = policy_losses.clipped_surrogate(log_prob, torch.zeros(2), -torch.ones(2), 0.2, 0.2)
    assert pushed_down.loss.tolist() == [math.inf, 1.0]
    infinite = policy_losses.clipped_surrogate(torch.tensor([math.inf]), torch.zeros(1), torch.zeros(1), 0.2, 0.2)
    assert infinite.loss.isnan().all()


# The divergences -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.floats(0.0, 1.0))
def test_the_kl_of_predicted_data_is_that_of_velocities_times_sigma_squared(seed: int, sigma: float) -> None:
    state, velocity, ref = (noise.keyed_noise((3, 2, 4), seed, name).double() for name in ("state", "v", "r"))
    predicted, ref_predicted = state - sigma * velocity, state - sigma * ref
    want = (predicted - ref_predicted).square().flatten(1).mean(1)
    assert torch.allclose(policy_losses.kl_x_prediction(velocity, ref, sigma), want, rtol=1e-9, atol=1e-12)
    levels = torch.tensor([sigma, 0.5, 1.0], dtype=torch.float64)
    each = policy_losses.kl_x_prediction(velocity, ref, levels)
    assert torch.allclose(each, levels**2 * policy_losses.kl_velocity(velocity, ref))


@given(st.floats(-3, 3))
def test_k2_and_k3_are_equal_where_policies_are_close_and_zero_where_they_agree(log_ratio: float) -> None:
    k2, k3 = (kl(scalar(log_ratio * 1e-3), scalar(0.0)) for kl in (policy_losses.kl_k2, policy_losses.kl_k3))
    assert k3.item() == pytest.approx(k2.item(), rel=2e-3, abs=1e-18)
    leaf, ref = scalar(log_ratio).requires_grad_(), scalar(log_ratio).requires_grad_()
    for kl in (policy_losses.kl_k2(leaf, ref), policy_losses.kl_k3(leaf, ref)):
        assert kl.item() == 0.0
        kl.sum().backward()
    assert leaf.grad is not None and leaf.grad.item() == 0.0 and ref.grad is None


def test_the_score_function_loss_has_the_gradient_of_the_on_policy_surrogate() -> None:
    advantage = torch.tensor([1.5, -0.5, 0.0])
    gradients = []
    for loss_of in (
        lambda x: policy_losses.score_function_loss(x, advantage),
        lambda x: policy_losses.clipped_surrogate(x, x.detach(), advantage, 0.1, 0.1).loss,
    ):
        log_prob = torch.tensor([-0.3, 0.2, 0.9], requires_grad=True)
        loss_of(log_prob).sum().backward()
        gradients.append(log_prob.grad)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], -advantage)


def test_half_precision_is_compared_in_float32() -> None:
    velocity, ref = noise.keyed_noise((2, 500), "v").bfloat16(), noise.keyed_noise((2, 500), "r").bfloat16()
    value = policy_losses.kl_velocity(velocity, ref)
    assert value.dtype == torch.float32
    assert torch.equal(value, (velocity.float() - ref.float()).square().mean(1))


# -- GRPO-Guard: golden trainers_grpo_guard, and its properties. Three peers, two
# forms. Ours is per sample and divided by the step size: Flow-Factory's ratio with the others' division. The released
# loss of Flow-GRPO and PaCo-RL averages <(mu - mu_old)^2> over the batch; that is ours plus a known offset, and is
# checked as such
def batch_offset(mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """What averaging the squared shift of the mean over the batch adds to each log-ratio."""
    shift = (mean - old_mean).square().flatten(1).mean(dim=1)
    return (shift.mean() - shift) / (2 * std.flatten())


def test_golden_losses_and_gradients_guard(golden) -> None:
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
            for actual in a.matches(rf"out_{peer}_guard_(loss|ratio|grad_mean)"):
                want = a.given(actual[0])[k] if actual[1] == "loss" else a.given(actual[0])[:, k]
                if actual[1] == "grad_mean":
                    want = want + a.given(f"out_{peer}_guard_grad_logprob")[:, k].view(column) * slope
                    assert (on_mean - want).abs().max() <= 1e-5 * want.abs().max(), actual[0]
                else:
                    assert error(out.loss.mean() if actual[1] == "loss" else out.ratio, want) <= 1e-5, actual[0]
    a.all_used("out_.*")


def test_on_policy_the_guarded_ratio_is_exactly_one() -> None:
    """And the loss is the policy gradient, divided by each sample's own step."""
    state, old = noise.keyed_noise((4, 3, 5), "x"), noise.keyed_noise((4, 3, 5), "m")
    mean = old.clone().requires_grad_()
    advantage = torch.tensor([1.0, -2.0, 0.0, 0.5])
    log_ratio = guard.guard_log_ratio(state, mean, old, torch.full((4, 1, 1), 0.3))
    out = guard.guard_surrogate(log_ratio, advantage, 0.1, 1e-6, 1e-6)
    assert (out.ratio == 1).all() and not out.clipped.any()
    assert torch.allclose(out.loss.detach(), -advantage / 0.1)
    out.loss.sum().backward()
    assert mean.grad is not None
    want = -advantage.view(-1, 1, 1) / 0.1 * (state - old) / 0.3 / 15
    assert torch.allclose(mean.grad, want, atol=1e-6)
    deltas = torch.tensor([0.1, 0.2, 0.3, 0.4])
    out = guard.guard_surrogate(log_ratio.detach(), torch.ones(4), deltas, 1e9, 1e9)
    assert torch.allclose(out.loss * deltas, -out.ratio)


def test_golden_flow_dppo(golden) -> None:
    """UniRL's loss of every (sample, step), its KLs, what it leaves out, and its gradient."""
    a = Arrays(golden("flow_dppo"))
    new = a.given("new_logp").requires_grad_()
    old, advantage, threshold = a.given("old_logp"), a.given("advantages"), a.number("threshold")
    means, before, std = a.given("new_means"), a.given("old_means"), a.given("transition_std")
    moved = torch.stack([kl_gaussian(means[:, k], before[:, k], std[k].expand(len(means))[:, None, None, None])
                         for k in range(len(std))], 1)  # fmt: skip
    a.check("kl", moved)
    actual = divergence_surrogate(new, old, advantage, moved, threshold=threshold)
    a.check("loss", actual.loss.detach())
    a.check("keep", ~actual.clipped)
    a.check("grad_new_logp", torch.autograd.grad(actual.loss.mean(), new)[0])
    a.near("metric_masked_fraction", actual.clipped.double().mean(), 1e-6)
    a.near("metric_kl_mask_fraction", (moved >= threshold).double().mean(), 1e-6)
    big = divergence_surrogate(torch.tensor([200.0]), torch.zeros(1), torch.ones(1), torch.ones(1), threshold=0.5)
    assert float(big.loss) == 0  # an infinite ratio that is left out is no NaN
