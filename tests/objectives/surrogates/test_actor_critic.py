"""Actor and critic losses against the golden arrays of pi_RL, DPPO and ReinFlow, and their invariants.

Covered: all of vla_losses, the losses of vla_dppo, all of vla_reinflow: losses, metrics and gradients.
"""

import math

import pytest
import torch
from torch import Tensor

from genrl.diffusion.methods.dynamic_tree_rpo import train
from genrl.mdp import chains, ddpm, kernels, levels
from genrl.mdp.chains import Chain
from genrl.mdp.noise import generator
from genrl.objectives import actor_critic as ac
from genrl.objectives.episodes import normalise_advantages
from genrl.objectives.policy_losses import clipped_surrogate, staleness_weight, truncated_weight
from tests.golden_cases import Case, check_all, error
from tests.reference.dppo import quantile_clip
from tests.reference.pi_rl import episode_weighted_mean, masked_mean

Errors = dict[str, tuple[float, float]]


def relative(got: Tensor, want: Tensor, tolerance: float) -> tuple[float, float]:
    """Relative to the largest value: gradients hold zeros."""
    scale = want.double().abs().max().clamp(min=1e-12)
    return error(got.double() / scale, want.double() / scale), tolerance


def at_level(case: Case, elements: Tensor) -> Tensor:
    level = {"chunk_level": "chunk", "action_level": "action", "token_level": "element"}[case.params["logprob_type"]]
    return chains.aggregate(elements, level, "sum")  # type: ignore[arg-type]


def beside(value: Tensor, ratio: Tensor) -> Tensor:
    """[B, 1] or [B, C] beside a ratio [B], [B, C] or [B, C, D]."""
    if ratio.dim() == 1:
        return value[:, 0]
    return value if ratio.dim() == 2 else value[..., None]


def average(case: Case, elements: Tensor, like: Tensor) -> Tensor:
    if not case.params["masked"]:
        return elements.mean()
    valid, length = (beside(case[name], like) for name in ("loss_mask", "loss_mask_sum"))
    return episode_weighted_mean(elements, valid, length, case.params["max_episode_steps"])


def check_policy_loss(case: Case) -> Errors:
    options = case.params
    log_prob, old = case["logprobs"].requires_grad_(), at_level(case, case["old_logprobs"])
    new = at_level(case, log_prob)
    advantage = beside(case["advantages"], new)
    surrogate = clipped_surrogate(new, old, advantage, options["clip_low"], options["clip_high"])
    bound = options["clip_ratio_c"]
    loss = surrogate.loss if bound is None else ac.dual_clip(surrogate.loss, advantage, bound)
    policy = total = average(case, loss, new)
    result: Errors = {"policy": relative(policy, case["metric_policy_loss"], 1e-4)}
    leaves = {"grad_logprobs": log_prob}
    if options["loss_type"] == "actor_critic":
        values = case["values"].requires_grad_()
        bounds = {"clip": options["value_clip"], "huber_delta": options["huber_delta"]}
        errors = ac.value_loss(values, case["returns"], old_values=case["prev_values"], **bounds)
        critic = average(case, errors, errors)
        result["value"] = relative(critic, case["metric_value_loss"], 1e-4)
        total, leaves = policy + critic, leaves | {"grad_values": values}
    result["loss"] = relative(total, case["loss"], 1e-4)
    for (name, _), gradient in zip(leaves.items(), torch.autograd.grad(total, list(leaves.values())), strict=True):
        result[name] = relative(gradient, case[name], 1e-4)
    valid = beside(case["loss_mask"], new) if options["masked"] else torch.ones((), dtype=torch.bool)
    # the released metrics divide by the mask's entries before it is broadcast (the ratio of single elements apart)
    often = new.numel() / valid.numel() if options["masked"] else 1.0
    metrics = {
        "metric_ratio": masked_mean(surrogate.ratio, valid) * (1.0 if new.dim() == 3 else often),
        "metric_clip_fraction": masked_mean(surrogate.clipped.double(), valid) * often,
        "metric_approx_kl": masked_mean(old - new, valid) * often,  # the first-order estimate
    }
    return result | {name: relative(value, case[name], 1e-4) for name, value in metrics.items()}


def interpolated(new: Tensor, old: Tensor, version: Tensor, current: float) -> Tensor:
    """pi_RL's estimate of the proximal policy's log-probability, which runs evaluate instead: the older the sample,
    the nearer to the present policy's."""
    age = current - version.double()
    share = torch.where(age > 0, (age - 1.0) / age.clamp(min=1e-9), 0.0).clamp(0.0, 1.0)
    return (old + share * (new - old)).detach()


def check_decoupled(case: Case) -> Errors:
    """Decoupled PPO as runs compute it: the clipped surrogate of weighted advantages around the proximal policy."""
    options = case.params
    log_prob, values = case["logprobs"].requires_grad_(), case["values"].requires_grad_()
    new, behaviour = (chains.aggregate(t, "chunk", "sum") for t in (log_prob, case["old_logprobs"]))
    near = behaviour
    if options["proximal"] == "versions":
        near = interpolated(log_prob, case["old_logprobs"], case["versions"], options["current_version"]).sum((1, 2))
    elif options["proximal"] == "prox":
        near = case["proximal_logprobs"].sum((1, 2))
    largest = math.inf if options["behave_weight_threshold"] is None else options["behave_weight_threshold"]
    weight = staleness_weight(near, behaviour, largest=largest)
    out = clipped_surrogate(new, near, weight * case["advantages"][:, 0], options["clip"], options["clip"])
    policy = masked_mean(out.loss, weight > 0)
    bounds = {"clip": options.get("value_clip", 0.2), "huber_delta": options.get("huber_delta", 10.0)}
    errors = ac.value_loss(values, case["returns"], old_values=case["prev_values"], **bounds)
    total = policy + errors.mean()
    gradients = torch.autograd.grad(total, (log_prob, values))
    return {
        "policy": relative(policy, case["metric_policy_loss"], 1e-4),
        "value": relative(errors.mean(), case["metric_value_loss"], 1e-4),
        "loss": relative(total, case["loss"], 1e-4),
        "grad_logprobs": relative(gradients[0], case["grad_logprobs"], 1e-4),
        "grad_values": relative(gradients[1], case["grad_values"], 1e-4),
    }


def test_pi_rl(golden) -> None:
    def check(case: Case) -> Errors:
        return (check_decoupled if "proximal" in case.params else check_policy_loss)(case)

    check_all(golden("vla_losses"), check)


def test_dppo(golden) -> None:
    """PPODiffusion.loss: a log-probability per element, clamped, averaged; the advantage and clip of its inner step."""

    def check(case: Case) -> Errors:
        options = case.params
        weights = {name: case[name].requires_grad_() for name in ("W", "b", "C", "critic_w")}
        state, x = case["state"].flatten(1), case["chain_prev"]
        grid = ddpm.ddpm_grid(ddpm.cosine_alpha_bars(options["K"]))
        steps, index = options["ft"], case["denoising_inds"]
        place = options["K"] - steps + index
        assert torch.equal(grid.timesteps[place], case["t"])
        time = case["t"][:, None] / options["K"]
        prediction = torch.tanh(x.flatten(1) @ weights["W"] + time * weights["b"] + state @ weights["C"]).view_as(x)
        step = ddpm.with_floor(ddpm.denoise(x, prediction, grid, place), options["min_logprob_std"])
        elements = chains.element_log_prob(case["chain_next"], step.mean, step.std)
        new, old = (
            chains.aggregate(chains.executed(t.clamp(-5, 2), options["reward_horizon"], x.shape[-1]), "chunk", "mean")
            for t in (elements, case["old_logprobs"])
        )
        advantage = case["advantages"]
        if options["norm_adv"]:
            advantage = normalise_advantages(advantage, eps=1e-8)
        advantage = quantile_clip(advantage, *options["adv_quantiles"])
        advantage = advantage * ac.denoising_discount(index, steps, options["gamma_denoising"])
        widths = {"clip": options["clip_ploss_coef"], "base": options["clip_base"], "rate": options["clip_rate"]}
        clip = ac.denoising_clip(index, steps, **widths)
        surrogate = clipped_surrogate(new, old, advantage, clip, clip)
        policy = surrogate.loss.mean()
        values = state @ weights["critic_w"]
        limits = {"old_values": case["old_values"], "clip": options["clip_vloss_coef"]}
        critic = ac.value_loss(values, case["returns"], **limits).mean()
        outside = ((surrogate.ratio - 1).abs() > clip).double().mean()
        result = {
            "logp": (error(elements, case["new_logprobs"]), 2e-3),
            "pg": (error(policy, case["pg_loss"]), 2e-4),
            "value": (error(critic, case["v_loss"]), 2e-4),
            "clipfrac": (error(outside, case["clipfrac"]), 1e-6),
            "kl": (error(ac.approximate_kl(new, old).mean(), case["approx_kl"]), 2e-4),
            "ratio": (error(surrogate.ratio.mean(), case["ratio_mean"]), 2e-4),
        }
        gradients = torch.autograd.grad(policy, [weights[name] for name in "WbC"])
        for name, gradient in zip("WbC", gradients, strict=True):
            result[f"grad_{name}"] = relative(gradient, case[f"grad_{name}"], 2e-3)
        (of_critic,) = torch.autograd.grad(critic, weights["critic_w"])
        result["grad_critic"] = relative(of_critic, case["grad_critic_w"], 2e-4)
        return result

    check_all(golden("vla_dppo"), check, lambda case: "terminated" in case)  # of GAE and reward scaling


def test_reinflow(golden) -> None:
    """PPOFlow.loss: the joint log-probability of a chain, its std from the policy's own head."""

    def check(case: Case) -> Errors:
        options, states = case.params, case["chains"]
        weights = {name: case[name].requires_grad_() for name in ("W", "N")}
        state, steps = case["state"].flatten(1), options["K"]
        sigmas, shape = levels.linspace_grid(steps), states[:, 0].shape

        def field(x: Tensor, time: Tensor) -> Tensor:
            return torch.tanh(x.flatten(1) @ weights["W"] + time * case["b"] + state @ case["C"]).view(shape)

        std = chains.bounded_std(state @ weights["N"], *options["std_range"]).view(shape)
        moved = []
        for k in range(steps):
            velocity = chains.noise_at_zero(field)(states[:, k], sigmas[k])
            moved.append(chains.learned_noise(states[:, k], velocity, sigmas[k], sigmas[k + 1], std=std, clip=1.0))
        chain = Chain(states, torch.stack([m.mean for m in moved], 1), torch.stack([m.std for m in moved], 1))
        over_steps = "mean" if options["normalize_denoising_horizon"] else "sum"
        over_elements = "mean" if options["normalize_act_space_dimension"] else "sum"
        elements = chains.chain_log_prob(chain, initial=options["account_for_initial"], reduction=over_steps)
        low, high = options["logprob_clamp"]
        log_prob = chains.aggregate(elements, "chunk", over_elements)
        new, old = log_prob.clamp(low, high), case["old_logprobs"].clamp(low, high)
        advantage = normalise_advantages(case["advantages"], eps=1e-8)
        surrogate = clipped_surrogate(new, old, advantage, options["clip"], options["clip"])
        policy = surrogate.loss.mean()
        first = [torch.ones_like(chain.stds[:, :1])] if options["account_for_initial"] else []
        rate = chains.entropy(torch.cat([*first, chain.stds], 1)).mean(1)  # always per step
        bonus = -chains.aggregate(rate, "chunk", over_elements).mean()
        values = state @ case["critic_w"]
        limits = {"old_values": case["old_values"], "clip": options["clip_vloss"]}
        critic = ac.value_loss(values, case["returns"], **limits).mean()
        total = policy + options["ent_coef_in_grad"] * bonus
        gradients = torch.autograd.grad(total, (weights["W"], weights["N"]))
        outside = ((surrogate.ratio - 1).abs() > options["clip"]).double().mean()
        return {
            "logp": (error(log_prob, case["new_logprobs"]), 1e-4),
            "pg": (error(policy, case["pg_loss"]), 2e-3),
            "entropy": (error(bonus, case["entropy_loss"]), 2e-3),
            "value": (error(critic, case["v_loss"]), 2e-3),
            "clipfrac": (error(outside, case["clipfrac"]), 1e-6),
            "kl": (error(ac.approximate_kl(new, old).mean(), case["approx_kl"]), 2e-3),
            "grad_W": relative(gradients[0], case["grad_W"], 2e-3),
            "grad_N": relative(gradients[1], case["grad_N"], 2e-3),
        }

    check_all(golden("vla_reinflow"), check)


def test_weights_of_stale_samples_and_of_advantages_and_a_value_clip_that_never_lowers_the_loss() -> None:
    """p_proximal / p_behaviour, 0 above the bound; 1, and so plain PPO, where both are one policy. No gradient."""
    near, old = torch.tensor([3.0, 1.0, 0.0, -1.0], requires_grad=True), torch.zeros(4)
    weight = staleness_weight(near, old)
    assert weight.tolist() == pytest.approx([0.0, math.e, 1.0, 1 / math.e]) and not weight.requires_grad
    assert staleness_weight(near, old, largest=2.0).tolist() == pytest.approx([0.0, 0.0, 1.0, 1 / math.e])
    truncated = truncated_weight(near, old)
    assert truncated.tolist() == pytest.approx([1.0, 1.0, 1.0, 1 / math.e]) and not truncated.requires_grad
    values, returns, old = torch.randn(3, 99, generator=generator(0))
    plain = ac.value_loss(values, returns)
    torch.testing.assert_close(plain, 0.5 * (values - returns) ** 2)
    assert (ac.value_loss(values, returns, old_values=old, clip=0.2) >= plain).all()
    far = ac.value_loss(values, returns, huber_delta=0.3)
    torch.testing.assert_close(far, torch.nn.functional.huber_loss(values, returns, reduction="none", delta=0.3))
    weights = ac.advantage_weights(torch.tensor([1.0, 9.0]), torch.tensor([0.5, 0.0]), temperature=2.0, largest=50.0)
    assert weights.tolist() == pytest.approx([math.e, 50.0])
    assert ac.denoising_clip(torch.zeros(2), 1, clip=0.01, base=0.001).tolist() == [0.01, 0.01]  # of one step


# -- FISOR against the golden arrays (its cases of vla_reference) and what its weights promise
def test_fisor(golden) -> None:
    def check(case: Case) -> dict[str, tuple[float, float]]:
        options = case.params
        how = {name: options[name] for name in ("reward_temperature", "cost_temperature")}
        how |= {"largest_reward_weight": options["reward_ub"], "largest_cost_weight": options["cost_ub"]}
        weights = ac.cloning_weights(*(case[name] for name in ("q", "v", "qc", "vc")), **how)
        target = ac.q_target(case["rewards"], case["next_v"], case["mask"] == 0, options["gamma"])
        reach = ac.feasibility_target(case["h"], case["next_vc"], case["mask"], options["gamma"])
        value = ac.expectile_loss(case["q"] - case["v"], options["expectile"]).mean()
        violation = ac.reversed_expectile_loss(case["qc"] - case["vc"], options["cost_expectile"]).mean()
        ours = {
            "target_q": target,
            "target_qc": reach,
            "v_loss": value,
            "vc_loss": violation,
            "weights": weights,
            "actor_loss": ac.weighted_noise_loss(case["eps_pred"], case["eps"], weights),
        }
        return {name: (error(got, case[name]), 1e-9) for name, got in ours.items()}

    check_all(golden("vla_reference"), check, lambda case: case.fn != "fisor")  # GAE: test_gae


# -- Dynamic-TreeRPO's supervised part: bounds and weights at their ends, and gradients
def test_each_sample_is_clipped_at_its_own_bounds_and_weighs_0_for_the_best_and_1_for_the_worst() -> None:
    advantage = torch.tensor([2.0, 0.1, -2.0, -0.1]).double()
    lower, upper = train.dynamic_clip_bounds(advantage, low=0.1, high=0.2, sensitivity=0.5)
    new = torch.tensor([1.25, 1.25, 0.87, 0.87]).double().log().requires_grad_()
    out = clipped_surrogate(new, torch.zeros(4).double(), advantage, lower, upper)
    assert out.clipped.tolist() == [False, True, False, True]
    (gradient,) = torch.autograd.grad(out.loss.sum(), new)
    assert torch.equal(gradient == 0, out.clipped)
    rewards = torch.tensor([[1.0, 3.0, 2.0, math.nan], [5.0, 5.0, 5.0, 5.0], [math.nan] * 4])
    weights = train.progress_weights(rewards)
    assert torch.allclose(weights[0], torch.tensor([1.0, 0.0, 0.5, 0.0]).double(), atol=1e-8)
    assert (weights[1:] == 0).all()


def test_the_sound_target_leads_to_the_picture() -> None:
    x, clean = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).unbind()
    sigma = torch.tensor([1.0, 0.6, 0.2])
    velocity = train.velocity_towards(x, clean, sigma)
    assert torch.allclose(kernels.ode(x, velocity, sigma, 0.0).mean, clean, atol=1e-6)
