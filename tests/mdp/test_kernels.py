"""What holds for the kernels at any state, velocity and time (their numbers: below)."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from genrl.mdp import kernels, noise
from genrl.mdp.kernels import Transition
from tests.golden_cases import Arrays, Case, cases, check_all, error, through
from tests.reference.cps import cps_log_prob
from tests.reference.grids import shifted_grid


def pair(seed: int, shape: tuple[int, ...] = (2, 3, 4)) -> tuple[Tensor, Tensor]:
    return noise.keyed_noise(shape, seed, "x").double(), noise.keyed_noise(shape, seed, "v").double()


def close(ours: Tensor, want: Tensor, tolerance: float = 1e-12) -> bool:
    return bool(((ours - want).abs() <= tolerance * want.abs().clamp(min=1.0)).all())


def flow_sde(x: Tensor, v: Tensor, sigma: float, sigma_next: float, noise_level: float) -> Transition:
    return kernels.flow_sde(x, v, sigma, sigma_next, noise_level=noise_level, sigma_max=0.97)


STOCHASTIC = {
    "flow_sde": flow_sde,
    "dance_sde": lambda x, v, s, t, a: kernels.dance_sde(x, v, s, t, noise_level=a),
    "flow_cps": lambda x, v, s, t, a: kernels.flow_cps(x, v, s, t, noise_level=a),
    "flow_ddim": lambda x, v, s, t, a: kernels.flow_ddim(x, v, s, t, noise_level=a),
}
BY_NAME = pytest.mark.parametrize("kernel", STOCHASTIC.values(), ids=STOCHASTIC)


# Replay --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
@BY_NAME
def test_a_replayed_step_has_ratio_one_bit_for_bit(kernel, storage: torch.dtype) -> None:
    """The next state is rounded to its storage type before it is scored."""
    sigmas = shifted_grid(10, 3.0)
    x, v = noise.keyed_noise((3, 4, 8, 8), "x").to(storage), noise.keyed_noise((3, 4, 8, 8), "v")
    step = kernel(x, v, sigmas[4], sigmas[5], 0.7)
    action = kernels.sample(step.mean, step.std, noise.keyed_noise((3, 4, 8, 8), "n")).to(storage)
    recorded = kernels.log_prob(action, step.mean, step.std)
    again = kernel(x.clone(), v.clone().requires_grad_(), sigmas[4], sigmas[5], 0.7)
    replayed = kernels.log_prob(action, again.mean, again.std)
    assert torch.equal((replayed - recorded).exp(), torch.ones(3))


@BY_NAME
def test_samples_at_different_steps_share_a_batch(kernel) -> None:
    sigmas = shifted_grid(10, 3.0)
    index = torch.tensor([0, 7, 3, 8])
    x, v, y = (noise.keyed_noise((4, 3, 5, 5), name) for name in "xvy")
    together = kernel(x, v, sigmas[index], sigmas[index + 1], 0.7)
    assert together.std.shape == (4, 1, 1, 1)
    for row, i in enumerate(index.tolist()):
        alone = kernel(x[row : row + 1], v[row : row + 1], sigmas[i], sigmas[i + 1], 0.7)
        assert torch.equal(alone.mean[0], together.mean[row]) and torch.equal(alone.std[0], together.std[row])
        want = kernels.log_prob(y[row : row + 1], alone.mean, alone.std)[0]
        assert kernels.log_prob(y, together.mean, together.std)[row] == pytest.approx(want.item(), abs=1e-6)


def test_wrong_arguments_are_refused() -> None:
    x, v = pair(0)
    for times in ((0.5, 0.6), (0.0, 0.0), (1.1, 0.5), (14.6, 9.7), (0.5, -0.1)):  # off the straight path
        for kernel in (kernels.ode, partial(kernels.flow_cps, noise_level=0.5)):
            with pytest.raises(ValueError, match="flow-matching"):
                kernel(x, v, *times)
    with pytest.raises(ValueError, match="second value"):
        kernels.flow_sde(x, v, 1.0, 0.9, noise_level=0.7, sigma_max=1.0)
    with pytest.raises(ValueError, match="one value|per sample"):
        kernels.ode(x, v, torch.tensor([0.5, 0.5, 0.5]), 0.4)
    with pytest.raises(ValueError, match="prediction_type"):
        kernels.ddim(x, v, 0.5, 0.6, eta=1.0, prediction_type="flow")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="alpha_bar must be"):
        kernels.ddim(x, v, 0.6, 0.5, eta=1.0, prediction_type="epsilon")
    with pytest.raises(ValueError, match="zero terminal SNR"):
        kernels.ddim(x, v, 0.0, 0.5, eta=1.0, prediction_type="epsilon")


# DDIM ----------------------------------------------------------------------------------------------------------------
class NoFloat64OnTheWay(TorchDispatchMode):
    """As on MPS, which has no float64: no conversion from or to it together with a change of device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            assert torch.float64 not in (args[0].dtype, kwargs.get("dtype")), "float64 between two devices"
        return func(*args, **kwargs)


@pytest.mark.parametrize("times", ["float", "one", "each"])
def test_no_float64_leaves_the_host(times: str) -> None:
    x, v = (tensor.float() for tensor in pair(0))
    sigma = {"float": 0.75, "one": torch.tensor(0.75), "each": torch.tensor([0.75, 0.5])}[times]
    with NoFloat64OnTheWay():
        steps = [kernel(x, v, sigma, sigma / 2, 0.7) for kernel in STOCHASTIC.values()]
        steps.append(kernels.ddim(x, v, sigma / 2, sigma, eta=1.0, prediction_type="epsilon"))
        for step in steps:
            density = kernels.log_prob(x, step.mean, step.std)
            assert {step.mean.dtype, step.std.dtype, density.dtype} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_step_on_the_device_is_the_step_on_the_host(where: str) -> None:
    """States on the device, times on either: same transition, same density."""
    sigmas, index = shifted_grid(10, 3.0).to(where), torch.tensor([0, 4, 8], device=where)
    x, v, y = (noise.keyed_noise((3, 4, 16, 16), name) for name in "xvy")
    for name, kernel in STOCHASTIC.items():
        host = kernel(x, v, sigmas.cpu()[index.cpu()], sigmas.cpu()[index.cpu() + 1], 0.7)
        step = kernel(x.cuda(), v.cuda(), sigmas[index], sigmas[index + 1], 0.7)
        assert step.mean.is_cuda and step.std.is_cuda, name
        assert torch.equal(step.std.cpu(), host.std) and close(step.mean.cpu(), host.mean, 1e-6), name
        density = kernels.log_prob(y.cuda(), step.mean, step.std).cpu()
        assert close(density, kernels.log_prob(y, host.mean, host.std), 1e-6), name


# -- Every kernel against the numbers of the released trainers (golden samplers_* and trainers_sde_step)
Errors = dict[str, tuple[float, float]]


def times(case: Case) -> tuple[Tensor, Tensor]:
    index = torch.as_tensor(case.params["index"])
    return case["sigmas"][index], case["sigmas"][index + 1]


def compare(case: Case, step: Transition, density, state: float, density_tolerance: float) -> Errors:
    """mean, next state and the density at the drawn and at the replayed point, where the case holds them."""
    result: Errors = {}
    if "mean" in case:
        result["mean"] = error(step.mean, case["mean"]), state
    if "noise" in case:
        result["x_next"] = error(step.mean + step.std * case["noise"], case["x_next"]), state
    for at, value in (("x_next", "logp"), ("y_replay", "logp_replay")):
        if value not in case or at not in case:
            continue
        if case[value].isnan().any():
            assert (step.std == 0).all(), f"{case.id}: the peer's NaN must be a step of ours without a density"
            with pytest.raises(ValueError, match="not an action"):
                density(case[at], step)
        else:
            result[value] = error(density(case[at], step), case[value]), density_tolerance
    return result


def full_density(x: Tensor, step: Transition) -> Tensor:
    return kernels.log_prob(x, step.mean, step.std)


def without_constants(x: Tensor, step: Transition) -> Tensor:
    """MixGRPO's Dance-SDE drops -ln s - ln(2 pi)/2."""
    peak = kernels.log_prob(step.mean, step.mean, step.std)
    return full_density(x, step) - peak


def cps_density(x: Tensor, step: Transition) -> Tensor:
    return cps_log_prob(x, step.mean)


def test_flow_sde_and_wan_sde(golden) -> None:
    def check(case: Case) -> Errors:
        sigma, sigma_next = times(case)
        double = case.params.get("dtype") == "float64"
        tolerance = 1e-12 if double else 1e-5 if "PaCo" in case.peer else 2e-6
        if "sqrt_dt" in case:
            ends = {"sigma_max": case["sigmas"][1], "sigma_last": case.params["sigma_min"]}
            step = kernels.wan_sde(case["x"], case["v"], sigma, sigma_next, **ends)
            peer_std = case["std_ret"] * case["sqrt_dt"]
        else:
            clamp = case.params["sigma_max"]
            level = case.params["noise_level"]
            step = kernels.flow_sde(case["x"], case["v"], sigma, sigma_next, noise_level=level, sigma_max=clamp)
            delta = (sigma - sigma_next).reshape(-1, *[1] * (case["x"].dim() - 1))
            peer_std = case["std_ret"] if "MixGRPO" in case.peer else case["std_ret"] * delta.sqrt()
        density_tolerance = 1e-7 if double else through(step.std, tolerance)
        result = compare(case, step, full_density, tolerance, density_tolerance)
        result["std"] = error(step.std.squeeze(), peer_std.expand(step.std.shape).squeeze()), tolerance
        if "input_dtype" in case.params:  # x_next is rounded: equal after rounding, or one unit of that type apart
            kind = getattr(torch, case.params["input_dtype"])
            ours = (step.mean + step.std * case["noise"]).to(kind).float()
            unit = torch.finfo(kind).eps * case["x_next"].abs().clamp(min=torch.finfo(kind).tiny)
            result["x_next"] = ((ours - case["x_next"]).abs() / unit).max().item(), 1.0
        return result

    # left out: traps, whose std explodes as sigma == 1 never fires (next test)
    check_all(golden("samplers_flow_sde"), check, lambda case: "caveat" in case.params)


def test_the_unipc_trap_is_not_reproduced(golden) -> None:
    """Where the released clamp misses sigma = 1 - 1e-6 and gives a std that explodes, ours is at most the level."""
    traps = [case for case in cases(golden("samplers_flow_sde")) if "caveat" in case.params]
    assert traps
    for case in traps:
        level = case.params["noise_level"]
        sigma, sigma_next = case.params["sigma"], case.params["sigma_next"]
        step = kernels.flow_sde(case["x"], case["v"], sigma, sigma_next, noise_level=level, sigma_max=sigma_next)
        assert 0.5 * level < step.std.max() <= level * (1 + 1e-6)
        released = case["std_ret"].max() * (sigma - sigma_next) ** 0.5
        assert released == pytest.approx(level * (sigma / (1 - sigma) * (sigma - sigma_next)) ** 0.5, rel=1e-3)
        assert released > 2 * level


def test_dance_sde(golden) -> None:
    def check(case: Case) -> Errors:
        sigma, sigma_next = times(case)
        double = case.params["dtype"] == "float64"
        tolerance = 1e-12 if double else 4e-6  # small sigma: the score divides by its square
        step = kernels.dance_sde(case["x"], case["v"], sigma, sigma_next, noise_level=case.params["eta"])
        density = without_constants if "MixGRPO" in case.peer else full_density
        result = compare(case, step, density, tolerance, through(step.std))  # in float32 by this peer, always
        if "ode_next" in case:
            ode = kernels.ode(case["x"], case["v"], sigma, sigma_next)
            clean = kernels.ode(case["x"], case["v"], sigma, 0.0)
            result["ode_next"] = error(ode.mean, case["ode_next"]), tolerance
            result["x0_pred"] = error(clean.mean, case["x0_pred"]), tolerance
        return result

    check_all(golden("samplers_dance_sde"), check)


def test_flow_cps(golden) -> None:
    def check(case: Case) -> Errors:
        sigma, sigma_next = times(case)
        level = case.params["noise_level"]
        step = kernels.flow_cps(case["x"], case["v"], sigma, sigma_next, noise_level=level)
        result = compare(case, step, cps_density, 3e-6, 3e-6)
        result["std"] = error(step.std.squeeze(), case["std_ret"].expand(step.std.shape).squeeze()), 3e-6
        return result

    check_all(golden("samplers_cps"), check)


def test_ddim(golden) -> None:
    data = golden("samplers_ddim")

    def betas(case: Case) -> list:
        return [case.params[name] for name in ("beta_start", "beta_end", "beta_schedule", "num_train_timesteps")]

    tables = [(betas(case), case["alphas_cumprod"]) for case in cases(data) if "alphas_cumprod" in case]

    def alpha_bars(case: Case) -> tuple[Tensor | float, Tensor | float]:
        if "alpha_bar_t" in case.params:
            return case.params["alpha_bar_t"], case.params["alpha_bar_prev_used"]
        now, stride = torch.tensor(case.params["timestep"]), case.params["num_train_timesteps"] // case.params["N"]
        table = next(values for known, values in tables if known == betas(case))
        return table[now], table[(now - stride).clamp(min=0)]

    def check(case: Case) -> Errors:
        options, now = case.params, alpha_bars(case)
        clip = options["clip_sample_range"] if options["clip_sample"] else None
        threshold = None
        if options.get("thresholding"):
            threshold = options["dynamic_thresholding_ratio"], options["sample_max_value"]
        again = options.get("use_clipped_model_output", False)
        how = {name: options[name] for name in ("eta", "prediction_type")}
        how |= {"clip_range": clip, "threshold": threshold, "recompute_noise": again}
        step = kernels.ddim(case["x"], case["model_output"], *now, **how)
        result = compare(case, step, full_density, 2e-5, max(1e-4, through(step.std, 1e-5)))
        if "x0_pred" in case:
            kind = options["prediction_type"]
            clean = kernels.ddim(case["x"], case["model_output"], now[0], 1.0, eta=0.0, prediction_type=kind)
            result["x0_pred"] = error(clean.mean, case["x0_pred"]), 2e-5
        return result

    # left out: the schedule itself, which the pipeline's own scheduler makes
    check_all(data, check, lambda case: case.params.get("kind") == "schedule")


def gaussian_velocity(x: Tensor, sigma: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """The optimal velocity for data N(mean, std^2) per coordinate."""
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    return (sigma - (1 - sigma) * std**2) / variance * (x - (1 - sigma) * mean) - mean


def test_free_running_trajectories(golden) -> None:
    """Whole rollouts from the initial noise with a velocity known in closed form: errors may accumulate, up to 1e-5."""

    def step_at(case: Case, i: int, x: Tensor, v: Tensor) -> Transition:
        sigmas, kind = case["sigmas"], case.params["kind"]
        at = (x, v, sigmas[i], sigmas[i + 1])
        low, high = case.params.get("window", (0, len(sigmas)))
        if kind == "ODE" or not low <= i < high:
            return kernels.ode(*at)
        if kind in ("Flow-SDE", "window"):
            return kernels.flow_sde(*at, noise_level=case.params["noise_level"], sigma_max=sigmas[1])
        if kind == "Dance-SDE":
            return kernels.dance_sde(*at, noise_level=case.params["eta"])
        assert kind == "CPS"
        return kernels.flow_cps(*at, noise_level=case.params["noise_level"])

    def check(case: Case) -> Errors:
        density = cps_density if case.params["kind"] == "CPS" else full_density
        x, worst = case["x_init"], dict.fromkeys(("velocity", "mean", "state", "logp"), 0.0)
        for i in range(len(case["sigmas"]) - 1):
            v = gaussian_velocity(x, case["sigmas"][i], case["m"], case["s"])
            step = step_at(case, i, x, v)
            x = step.mean + step.std * case["Z"][i]
            now = {"velocity": error(v, case["V"][i]), "mean": error(step.mean, case["mean"][i])}
            now["state"] = error(x, case["X"][i + 1])
            if "logp" in case:
                nan = bool(case["logp"][i].isnan().any())
                assert nan == (bool((step.std == 0).all()) and density is full_density)
                # of states that have drifted: see `through`
                scale = 1.0 if nan or density is cps_density else step.std.min().item()
                now["logp"] = 0.0 if nan else min(scale, 1.0) * error(density(x, step), case["logp"][i])
            worst.update({name: max(worst[name], value) for name, value in now.items()})
        return {name: (value, 2e-5) for name, value in worst.items()}

    check_all(golden("samplers_trajectories"), check)


def test_trainers_sde_step(golden) -> None:
    """The kernels once more, as the trainers' files hold them: states to 1e-5, densities to 3e-4."""
    a = Arrays(golden("trainers_sde_step"))
    x, v, noise, flow, dance = (a.given(f"in_{name}") for name in ("x", "v", "noise", "sigmas", "dance_sigmas"))
    flow_sde = partial(kernels.flow_sde, sigma_max=flow[1])
    kinds = {
        "sde": (flow, flow_sde, "noise_level_sde", full_density),
        "ff_flow_sde": (flow, flow_sde, "ff_noise_level_flow_sde", full_density),
        "cps": (flow, kernels.flow_cps, "noise_level_cps", cps_density),
        "ff_cps": (flow, kernels.flow_cps, "ff_noise_level_cps", cps_density),
        "ff_dance_sde": (flow, kernels.dance_sde, "ff_noise_level_dance_sde", full_density),
        "dance": (dance, kernels.dance_sde, "dance_eta", full_density),
    }
    for prefix, (sigmas, kernel, level, density) in kinds.items():
        for row, i in enumerate(a.given("in_step_index").tolist()):
            step = partial(kernel, sigma=sigmas[i], sigma_next=sigmas[i + 1], noise_level=a.number(f"in_{level}"))
            now, perturbed = step(x[row], v[row]), step(x[row], v[row] + 0.05 * x[row])
            taken, delta = a.given(f"out_{prefix}_next")[row], sigmas[i] - sigmas[i + 1]
            ours = {
                "next": (now.mean + now.std * noise[row], 1e-5),
                "mean": (now.mean, 1e-5),
                "logprob": (density(taken, now), 3e-4),
                "logprob_perturbed_v": (density(taken, perturbed), 3e-4),
                "std_dev": (now.std if kernel is kernels.flow_cps else now.std / delta.sqrt(), 1e-5),
                "sqrt_dt": (delta.sqrt().expand_as(now.std), 1e-6),
                "pred_x0": (kernels.ode(x[row], v[row], sigmas[i], 0.0).mean, 1e-5),
            }
            for name, (value, tolerance) in ours.items():
                if f"out_{prefix}_{name}" in a:
                    assert error(value, a.given(f"out_{prefix}_{name}")[row]) <= tolerance, (prefix, name, i)
    a.all_used("out_.*", but="out_ff_sde_steps.*")  # which steps Flow-Factory draws


def test_ode_and_flow_ddim(golden) -> None:
    """The Euler and first-order solver rollouts, and DiffusionNFT's DDIM step on the straight path."""
    deterministic = ("euler_ode_trajectory", "nft_dpm1", "rlinf_dpm1", "dpm_trajectory")

    def check(case: Case) -> Errors:
        kind = case.params["kind"]
        if kind == "flow_ddim":
            step = kernels.flow_ddim(case["x"], case["v"], *times(case), noise_level=case.params["eta"])
            result = compare(case, step, full_density, 2e-6, through(step.std))
            rho = (case["std_coef"] * case["std_shrink"]).expand(step.std.shape)
            clean = kernels.ode(case["x"], case["v"], times(case)[0], 0.0).mean
            return result | {"std": (error(step.std, rho), 1e-6), "x0_pred": (error(clean, case["x0_pred"]), 1e-6)}
        x, states, densities, smallest = case["X"][0], [case["X"][0]], [], torch.ones(())
        for i, v in enumerate(case["V"]):
            at = (x, v, case["sigmas"][i], case["sigmas"][i + 1])
            step = kernels.ode(*at) if kind in deterministic else kernels.flow_ddim(*at, noise_level=1.0)
            x = step.mean if kind in deterministic else kernels.sample(step.mean, step.std, case["Z"][i])
            states.append(x)
            if "logp" in case and bool((step.std > 0).all()):
                densities.append(full_density(case["X"][i + 1], step))
                smallest = torch.minimum(smallest, step.std.min())
        result = {"states": (error(torch.stack(states), case["X"]), 4e-6)}
        if densities:  # the last step has no noise: the released code gives NaN there
            assert case["logp"][-1].isnan().all() and len(densities) == len(case["V"]) - 1
            result["logp"] = error(torch.stack(densities), case["logp"][:-1]), through(smallest, 4e-6)
        return result

    def left_out(case: Case) -> bool:
        """Multistep solvers, and windows whose noise is not stored: test_schedules."""
        kind = case.params["kind"]
        return case.params.get("order", 1) > 1 or kind.endswith("dpm2") or kind == "mixed_window_trajectory"

    check_all(golden("samplers_ode_dpm"), check, left_out)
