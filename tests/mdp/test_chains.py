"""Chains of action chunks: replay, which steps are drawn, a learned std."""

import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp import chains, ddpm, kernels, levels, noise
from genrl.mdp.chains import Chain
from genrl.mdp.kernels import Transition
from tests.golden_cases import Case, check_all, error, through
from tests.reference.cps import cps_log_prob


def velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """A nonlinear field: any policy."""
    return torch.tanh(0.7 * x + 0.3) + sigma.reshape(-1, *[1] * (x.dim() - 1)) * x.flip(-1)


SELECTIONS = ["all", "random_per_env", "random_per_batch", "last"]


def transition_of(kind: str):
    """(step k or one step per row, x) -> Transition: the same rule for sampling and for replay."""
    sigmas, grid = levels.linspace_grid(4), ddpm.ddim_grid(ddpm.cosine_alpha_bars(20), 4)

    def transition(k, x: Tensor) -> Transition:
        at = torch.as_tensor(k).expand(len(x))
        if kind == "dppo":
            step = ddpm.denoise(x, torch.tanh(x + at.view(-1, 1, 1) / 4), grid, at)
            return ddpm.with_floor(step, 0.1)
        now = sigmas[at], sigmas[at + 1]
        v = velocity(x, now[0])
        if kind == "flow_sde":
            return kernels.flow_sde(x, v, *now, noise_level=0.5, sigma_max=sigmas[1])
        if kind == "flow_cps":
            return kernels.flow_cps(x, v, *now, noise_level=0.5)
        std = chains.bounded_std(x.flip(-2), 0.08, 0.16)
        return chains.learned_noise(x, v, *now, std=std, clip=1.0 if kind == "reinflow" else None)

    return transition


@pytest.mark.parametrize("kind", ["flow_sde", "flow_cps", "flow_noise", "reinflow", "dppo"])
def test_replaying_a_whole_chain_gives_ratio_one(kind: str) -> None:
    """All steps of all rows in one call, each at its own step: the joint ratio is 1 exactly, for every transition."""
    transition = transition_of(kind)
    sampled = noise.keyed_noise((6, 5, 4, 3), 11)
    clips = {"noise_clip": 3.0, "last_clip": 1.0} if kind in ("reinflow", "dppo") else {}
    chain = chains.sample_chain(transition, sampled[:, 0], sampled[:, 1:], **clips)
    steps = 3 if kind == "flow_cps" else 4  # its last step is deterministic
    rows = chain.states[:, :steps].flatten(0, 1)
    again = transition(torch.arange(steps).repeat(6), rows)
    shape = (6, steps, 4, 3)
    std = again.std.expand_as(again.mean).reshape(shape)
    replayed = Chain(chain.states[:, : steps + 1], again.mean.view(shape), std)
    recorded = Chain(chain.states[:, : steps + 1], chain.means[:, :steps], chain.stds[:, :steps])
    elements = (chains.chain_log_prob(c, initial=True, reduction="sum") for c in (recorded, replayed))
    old, new = (chains.aggregate(each, "chunk", "sum") for each in elements)
    assert torch.equal(old, new)


@given(st.integers(1, 8), st.integers(1, 6), st.sampled_from(SELECTIONS), st.data())
def test_steps_that_are_drawn(batch: int, steps: int, selection, data) -> None:
    skip = data.draw(st.booleans()) and steps > 1
    count = data.draw(st.integers(1, steps - skip)) if selection == "last" else 1
    noisy = chains.noisy_steps(selection, batch, steps, count=count, skip_last=skip, generator=noise.generator(8))
    assert noisy.shape == (batch, steps)
    expected = steps - skip if selection == "all" else count
    assert (noisy.sum(1) == expected).all()
    assert not (skip and noisy[:, -1].any())
    if selection != "random_per_env":
        assert (noisy == noisy[:1]).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: chains.noisy_steps("random_per_env", 2, 3), "pass a generator"),
        (lambda: chains.noisy_steps("last", 2, 3, count=4), "cannot be stochastic"),
        (lambda: chains.noisy_steps("all", 2, 1, skip_last=True), "cannot be stochastic"),
        (lambda: chains.noisy_steps("some", 2, 1), "selection must be"),
        (lambda: chains.bounded_std(torch.zeros(1), 0.2, 0.1), "0 < low <= high"),
        (lambda: chains.executed(torch.zeros(1, 2, 2), 3, 1), "cannot execute"),
        (lambda: chains.aggregate(torch.zeros(1, 2, 2), "token", "sum"), "level must be"),
    ],
)
def test_what_cannot_be_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# -- Transitions of action chunks against the golden arrays of pi_RL, DPPO and ReinFlow. Covered: every case of
# samplers_vla (steps, noise head, annealing, rollout and replay), samplers_dppo (schedule, chains, log-probabilities)
# and samplers_reinflow (chain, joint log-probabilities, noise bounds)
Errors = dict[str, tuple[float, float]]


def grid_of(case: Case) -> Tensor:
    if "timesteps" in case:
        return case["timesteps"]
    steps = case.params["N"]
    if case.params.get("dtype") == "float64":
        return 1.0 - torch.arange(steps + 1, dtype=torch.float64) / steps
    return levels.linspace_grid(steps)


LAYER = r"net_mlp_logvar_moduleList_(\d+)_linear_1_weight"


def noise_head(case: Case) -> Tensor:
    """The exploration network: tanh layers, then the bounds."""
    layers = {int(result[1]): name for name in case.arrays if (result := re.fullmatch(LAYER, name))}
    hidden = case["features"]
    for k in sorted(layers):
        hidden = hidden if k == 0 else hidden.tanh()
        hidden = hidden @ case[layers[k]].T + case[layers[k].replace("weight", "bias")]
    low, high = ((0.5 * case[f"net_logvar_{end}"]).exp().item() for end in ("min", "max"))
    return chains.bounded_std(hidden, low, high)


def one_step(case: Case) -> Transition:
    kind, index, sigmas = case.params["kind"], case.params["index"], grid_of(case)
    x, v = case["x"], case["v"]
    at = sigmas[index], sigmas[index + 1]
    level = case.params.get("noise_level")
    if kind == "pi_flow_ode":
        return kernels.ode(x, v, *at)
    if kind == "pi_flow_cps":
        return kernels.flow_cps(x, v, *at, noise_level=level)
    if kind == "pi_flow_noise":
        return chains.learned_noise(x, v, *at, std=noise_head(case))
    if kind == "inverted_time_flow_sde":
        turned = chains.noise_at_zero(lambda x, time: v)(x, at[0])
        return kernels.flow_sde(x, turned, *at, noise_level=level, sigma_max=sigmas[1])
    assert kind == "pi_flow_sde"
    return kernels.flow_sde(x, v, *at, noise_level=level, sigma_max=sigmas[1])


def check_step(case: Case) -> Errors:
    step, double = one_step(case), case.params.get("dtype") == "float64"
    tolerance = 1e-12 if double else 2e-6
    std = step.std.expand(step.mean.shape)
    result = {
        "mean": (error(step.mean, case["mean"]), tolerance),
        "std": (error(std, case["std"]), tolerance),
        "x_next": (error(step.mean + step.std * case["noise"], case["x_next"]), tolerance),
    }
    if (step.std == 0).all():
        assert (case["logp_elem"] == 0).all(), f"{case.id}: the peer's 0 must be a step of ours without a density"
        with pytest.raises(ValueError, match="not an action"):
            chains.element_log_prob(case["x_next"], step.mean, step.std)
    else:
        ours = chains.element_log_prob(case["x_next"], step.mean, step.std)
        given = chains.element_log_prob(case["x_next"], case["mean"], case["std"])
        # the peer's constant ln(2 pi)/2 is float32 where everything else is float64
        result["logp given mean and std"] = error(given, case["logp_elem"]), 1e-7 if double else 2e-6
        result["logp"] = error(ours, case["logp_elem"]), 1e-7 if double else through(step.std)
    if "logp_elem_safe" in case:
        flat = (case[name].reshape(-1, 1) for name in ("x_next", "mean"))
        result["logp_safe"] = error(cps_log_prob(*flat).view(step.mean.shape), case["logp_elem_safe"]), 1e-6
    if "ode_next" in case:
        sigmas, index = grid_of(case), case.params["index"]
        ode = kernels.ode(case["x"], -case["v"], sigmas[index], sigmas[index + 1])
        result["ode_next"] = error(ode.mean, case["ode_next"]), tolerance
    if "entropy_elem" in case:
        result["entropy"] = error(chains.entropy(std), case["entropy_elem"]), 1e-6
    return result


def check_rollout(case: Case) -> Errors:
    """From the recorded chain: each transition, the scored step or the joint density, and its three levels."""
    options, states = case.params, case["chains"]
    steps, joint = options["N"], options["joint_logprob"]
    sigmas = levels.linspace_grid(steps)

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        return x @ case["Wv"] + case["bt"] * sigma.view(-1, 1, 1)

    result: Errors = {}
    if joint:
        std = noise_head(case)
        moved = [
            chains.learned_noise(states[:, k], velocity(states[:, k], sigmas[k]), sigmas[k], sigmas[k + 1], std=std)
            for k in range(steps)
        ]
        chain = Chain(states, torch.stack([m.mean for m in moved], 1), torch.stack([m.std for m in moved], 1))
        elements = chains.chain_log_prob(chain, initial=True, reduction="mean")
        stds = torch.cat([torch.ones_like(states[:, :1]), chain.stds], 1)
        result["entropy"] = error(chains.entropy(stds), case["entropy"]), 1e-6
        tolerance = through(std)
    else:
        index = case["denoise_inds"][:, 0]
        assert (case["denoise_inds"] == index[:, None]).all() and (index < steps - options["ignore_last"]).all()
        noisy = torch.zeros(len(index), steps).scatter(1, index[:, None], 1.0)
        for k in range(steps):  # the step of each row that is not the noisy one is the ODE step exactly
            x = states[:, k]
            level = noisy[:, k] * options["noise_level"]
            step = kernels.flow_sde(
                x, velocity(x, sigmas[k]), sigmas[k], sigmas[k + 1], noise_level=level, sigma_max=sigmas[1]
            )
            quiet = noisy[:, k] == 0
            if quiet.any():
                result[f"ode {k}"] = error(step.mean[quiet], states[quiet, k + 1]), 1e-6
        rows = torch.arange(len(index))
        x, at = states[rows, index], (sigmas[index], sigmas[index + 1])
        step = kernels.flow_sde(x, velocity(x, at[0]), *at, noise_level=options["noise_level"], sigma_max=sigmas[1])
        elements = chains.element_log_prob(states[rows, index + 1], step.mean, step.std)
        tolerance = through(step.std)
    result["actions"] = error(states[:, -1], case["actions"]), 0.0
    kept = chains.executed(elements, options["action_chunk"], options["action_env_dim"])
    for name in ("prev_logprobs", "logprobs_replay", "agg_token_level"):
        result[name] = error(kept, case[name]), tolerance
    for level in ("action", "chunk"):  # sums: of as many errors
        ours = chains.aggregate(kept, level, "sum")
        result[level] = error(ours, case[f"agg_{level}_level"]), tolerance * kept.numel() / ours.numel()
    assert torch.equal(chains.aggregate(kept, "element", "sum"), kept)
    return result


def test_pi_rl(golden) -> None:
    def check(case: Case) -> Errors:
        kind = case.params["kind"]
        if kind == "noise_head_bounds":
            std = chains.bounded_std(case["raw"], *case.params["std_range"])
            return {"std": (error(std, case["std"]), 1e-6)}
        return check_rollout(case) if kind == "rollout_replay" else check_step(case)

    check_all(golden("samplers_vla"), check, lambda case: case.params["kind"] == "noise_anneal")  # no sampler anneals


DPPO_MEAN = 5e-6
"""The released posterior takes 1 - alpha_bar in float32: its weight of x0 at the last step is 1 - 2.9e-6, ours 1."""


def dppo_actor(case: Case, x: Tensor, timestep: Tensor, copy: str) -> Tensor:
    state = case["state"].flatten(1)
    state = state if len(state) == len(x) else state.repeat_interleave(len(x) // len(state), 0)
    time = timestep.view(-1, 1, 1) / float(re.search(r"t/(\d+)", case.params["actor"])[1])
    return torch.tanh(x @ case[f"W_{copy}"] + case[f"b_{copy}"] * time + (state @ case[f"C_{copy}"])[:, None])


def dppo_chain(case: Case, grid: ddpm.DenoisingGrid) -> Chain:
    """The chain from its noise: the peer's generator draws the start and then one tensor for each step."""
    seed = int(str(case.params["rng"]).split("manual_seed(")[1].split(")")[0])
    generator, shape, steps = torch.Generator().manual_seed(seed), case["chains"][:, 0].shape, len(grid.timesteps)
    start = torch.randn(shape, generator=generator)
    noise = torch.stack([torch.randn(shape, generator=generator) for _ in range(steps)], 1)
    ft = case.params["ft_denoising_steps"]
    eta, clip = case.params.get("eta", 1.0), case.params["denoised_clip_value"]

    def transition(k: int, x: Tensor) -> Transition:
        copy = "ft" if bool(ddpm.fine_tuned(torch.tensor(k), steps, ft)) else "base"
        step = ddpm.denoise(x, dppo_actor(case, x, grid.timesteps[k], copy), grid, k, eta=eta, clip=clip)
        return ddpm.with_floor(step, case.params["min_sampling_denoising_std"])

    last = case.params.get("final_action_clip_value")
    return chains.sample_chain(transition, start, noise, noise_clip=case.params["randn_clip_value"], last_clip=last)


def check_evaluation_chain(case: Case, grid: ddpm.DenoisingGrid) -> Errors:
    """Without noise at the last step. The noise of the others is not what its seed gives, so they are not compared."""
    states, place = case["chains"], len(grid.timesteps) - 1
    step = ddpm.denoise(states[:, -2], dppo_actor(case, states[:, -2], grid.timesteps[place], "ft"), grid, place)
    assert (step.std == 0).all()
    last = step.mean.clamp(-1.0, 1.0)
    result = {"evaluation": (error(last, states[:, -1]), DPPO_MEAN)}
    return result | {"evaluation actions": (error(last, case["actions"]), DPPO_MEAN)}


def check_schedule(case: Case, alpha_bars: Tensor) -> Errors:
    """Betas, posterior variance and the posterior's weights of the clean action and of the state, by timestep."""
    full = ddpm.ddpm_grid(alpha_bars)
    one, index = torch.ones(case.params["K"], 1, dtype=torch.float64), torch.arange(case.params["K"])
    levels = {"alpha_bar": full.alpha_bar.flip(0), "alpha_bar_next": full.alpha_bar_next.flip(0)}
    posterior = partial(kernels.ddim, **levels, eta=1.0, prediction_type="sample", recompute_noise=True)
    variance = posterior(one, one).std[:, 0] ** 2
    assert torch.equal(full.timesteps.flip(0), index)
    return {
        "betas": (error(1 - (full.alpha_bar / full.alpha_bar_next).flip(0), case["betas"]), 1e-6),
        "alpha_bar": (error(alpha_bars, case["alphas_cumprod"]), 1e-6),
        "var": (error(variance, case["ddpm_var"]), 1e-6),
        "logvar": (error(variance.clamp(min=1e-20).log(), case["ddpm_logvar_clipped"]), 1e-4),
        "on_clean": (error(posterior(0 * one, one).mean[:, 0], case["mu_coef1"]), DPPO_MEAN),
        "on_state": (error(posterior(one, 0 * one).mean[:, 0], case["mu_coef2"]), 1e-6),
    }


def test_dppo(golden) -> None:
    def check(case: Case) -> Errors:
        kind, options = case.params["kind"], case.params
        alpha_bars = ddpm.cosine_alpha_bars(options["K"])
        full = ddpm.ddpm_grid(alpha_bars)
        if kind == "schedule":
            return check_schedule(case, alpha_bars)
        if kind == "ddpm_chain_deterministic":
            return check_evaluation_chain(case, full)
        grid = ddpm.ddim_grid(alpha_bars, options["ddim_steps"]) if kind == "ddim_chain" else full
        steps, ft = len(grid.timesteps), options["ft_denoising_steps"]
        recorded = case["chains"]
        ours = dppo_chain(case, grid).states[:, -ft - 1 :]
        result = {"chain": (error(ours, recorded), 1e-4)}
        if kind == "ddim_chain":
            result["alphas"] = error(grid.alpha_bar, case["ddim_alphas"]), 1e-6
            result["alphas_prev"] = error(grid.alpha_bar_next, case["ddim_alphas_prev"]), 1e-6
            assert torch.equal(grid.timesteps, case["ddim_t"])
        if "actions" in case:
            result["actions"] = error(ours[:, -1], case["actions"]), 1e-4
        batch = len(recorded)
        index = torch.arange(steps - ft, steps).repeat(batch)  # the peer's row order: a sample, then its steps
        x, x_next = (rows.flatten(0, 1) for rows in (recorded[:, :-1], recorded[:, 1:]))

        def log_prob(x: Tensor, x_next: Tensor, index: Tensor) -> Tensor:
            prediction = dppo_actor(case, x, grid.timesteps[index], "ft")
            clip = options["denoised_clip_value"]
            step = ddpm.denoise(x, prediction, grid, index, eta=options.get("eta", 1.0), clip=clip)
            floored = ddpm.with_floor(step, options["min_logprob_denoising_std"])
            return chains.element_log_prob(x_next, floored.mean, floored.std)

        loose = 1e-5 / options["min_logprob_denoising_std"]
        result["logp"] = error(log_prob(x, x_next, index), case["logp"]), loose
        if "sub_inds" in case:
            rows = torch.arange(batch)
            at, following = recorded[rows, case["sub_inds"]], recorded[rows, case["sub_inds"] + 1]
            result["sub_logp"] = error(log_prob(at, following, steps - ft + case["sub_inds"]), case["sub_logp"]), loose
            place = steps - 1 - case["pmv_t"]
            copy = "ft" if bool(ddpm.fine_tuned(place, steps, ft).all()) else "base"
            prediction = dppo_actor(case, case["pmv_x"], case["pmv_t"], copy)
            step = ddpm.denoise(case["pmv_x"], prediction, grid, place, clip=options["denoised_clip_value"])
            result["pmv_mean"] = error(step.mean, case["pmv_mean"]), 1e-6
            result["pmv_logvar"] = error((step.std**2).clamp(min=1e-20).log(), case["pmv_logvar"]), 1e-4
        return result

    check_all(golden("samplers_dppo"), check)


def test_reinflow(golden) -> None:
    def check(case: Case) -> Errors:
        kind, options = case.params["kind"], case.params
        if kind == "noise_bounds":
            return {"std": (error(chains.bounded_std(case["raw"], *options["std_range"]), case["std"]), 1e-6)}
        states, steps = case["chain"], options["K"]
        sigmas = levels.linspace_grid(steps)

        def joint(velocities: Tensor) -> Chain:
            turned = chains.noise_at_zero(lambda x, time: velocities[:, k])
            moved = []
            for k in range(steps):
                x = states[:, k]
                at = sigmas[k], sigmas[k + 1]
                std = case["std"][:, k].view(x.shape)
                clip = options["denoised_clip_value"]
                moved.append(chains.learned_noise(x, turned(x, at[0]), *at, std=std, clip=clip))
            return Chain(states, torch.stack([m.mean for m in moved], 1), torch.stack([m.std for m in moved], 1))

        chain = joint(case["V_train"])
        norm = chains.aggregate(chains.chain_log_prob(chain, initial=True, reduction="mean"), "chunk", "mean")
        total = chains.aggregate(chains.chain_log_prob(chain, initial=False, reduction="sum"), "chunk", "sum")
        sampled = chains.chain_log_prob(joint(case["V_sample"]), initial=True, reduction="mean")
        terms = torch.cat([torch.ones_like(states[:, :1]), chain.stds], 1)
        return {
            "norm": (error(norm, case["logp_norm"]), through(chain.stds)),
            "sum": (error(total, case["logp_sum"]), through(chain.stds)),
            # what the released sampler returned: evaluated on another time grid than the scorer's, of which only the
            # velocities are stored, not the std: near, not equal
            "rollout": (error(chains.aggregate(sampled, "chunk", "mean"), case["logp_rollout"]), 1e-2),
            "entropy": (error(chains.entropy(terms).flatten(1).mean(1), case["entropy_rate"]), 1e-6),
        }

    # left out: schedules of the noise of steps that no head sets, which nothing here has
    check_all(golden("samplers_reinflow"), check, lambda case: case.params["kind"] == "noise_schedule")
