"""The multistep solver: golden samplers_ode_dpm, MixGRPO-Flash's schedules, and its order of convergence."""

import re

import pytest
import torch

from genrl.mdp import ddpm, kernels, levels
from genrl.mdp.dpm import Prediction, dpm_solver, predict
from tests.golden_cases import Case, check_all, error, through
from tests.reference.grids import is_truncated, shifted_grid
from tests.reference.released_windows import released_points

Errors = dict[str, tuple[float, float]]


def solver_case(case: Case) -> Errors:
    """Over the prescribed velocities. As released, third order drops to second before the last of few steps."""
    kind = case.params["kind"]
    order = case.params.get("order", 2 if kind.endswith("dpm2") else 1)
    correction, stochastic = case.params.get("solver_type", "midpoint"), kind == "sde_dpm_trajectory"
    x, states, densities, history, smallest = case["X"][0], [case["X"][0]], [], [], torch.ones(())
    steps = len(case["V"])
    for i, v in enumerate(case["V"]):
        sigma, sigma_next = case["sigmas"][i], case["sigmas"][i + 1]
        most = 1 if i == steps - 2 and steps < 15 else 2
        used = history[-min(order - 1, most) :] if order > 1 else []
        step = dpm_solver(x, v, sigma, sigma_next, used, correction=correction, stochastic=stochastic)
        history.append(predict(x, v, sigma))
        x = kernels.sample(step.mean, step.std, case["Z"][i]) if stochastic else step.mean
        states.append(x)
        if stochastic and bool((step.std > 0).all()):
            densities.append(kernels.log_prob(case["X"][i + 1], step.mean, step.std))
            smallest = torch.minimum(smallest, step.std.min())
    result = {"states": (error(torch.stack(states), case["X"]), 4e-6)}
    if stochastic:
        assert case["logp"][-1].isnan().all() and len(densities) == len(case["V"]) - 1
        result["logp"] = error(torch.stack(densities), case["logp"][:-1]), through(smallest, 4e-6)
    return result


def window_case(case: Case) -> Errors:
    """ODE steps around a window of noise; the noise is drawn as the case says (X is [B, N + 1, ...] here)."""
    draws = torch.Generator().manual_seed(int(re.search(r"manual_seed\((\d+)\)", case.params["rng"])[1]))
    sigmas, x, dance = case["sigmas"], case["X"][:, 0], case.params["dynamics"] == "dance"
    states, worst = [x], 0.0
    for i, v in enumerate(case["V"]):
        at, in_window = (x, v, sigmas[i], sigmas[i + 1]), i in case.params["window"]
        assert in_window != bool(case["deterministic"][i])
        noise = torch.randn(x.shape, generator=draws) if in_window or not dance else None
        if not in_window:  # the log-probability stored here is meaningless, and ours is not defined
            x = kernels.ode(*at).mean
        else:
            level = case.params["eta"]
            step = (
                kernels.dance_sde(*at, noise_level=level)
                if dance
                else kernels.flow_sde(*at, noise_level=level, sigma_max=sigmas[1])
            )
            x = kernels.sample(step.mean, step.std, noise)
            density = kernels.log_prob(case["X"][:, i + 1], step.mean, step.std)
            if dance:  # released without its constants
                density = density - kernels.log_prob(step.mean, step.mean, step.std)
            worst = max(worst, error(density, case["logp"][:, i]) / through(step.std, 4e-6))
        states.append(x)
    return {"states": (error(torch.stack(states, dim=1), case["X"]), 4e-6), "logp": (worst, 1.0)}


def test_golden_trajectories(golden) -> None:
    def check(case: Case) -> Errors:
        return window_case(case) if case.params["kind"] == "mixed_window_trajectory" else solver_case(case)

    def left_out(case: Case) -> bool:
        """Euler steps and DDIM: tests/mdp/test_kernels.py."""
        return case.params["kind"] in ("euler_ode_trajectory", "flow_ddim")

    check_all(golden("samplers_ode_dpm"), check, left_out)


def test_golden_flash_schedules(golden) -> None:
    """MixGRPO-Flash as released, step by step: which kind, at which level, at which truncated time."""

    def check(case: Case) -> Errors:
        steps, window = case.params["N"], case.params["window"]
        grid = shifted_grid(steps, case.params["shift"])
        first = window[-1] + 1
        points = released_points(steps, window[-1], case.params["compress_ratio"])
        used = grid[: first + 1]
        if points > 1:
            tail = levels.compressed_tail(grid, first, points - 1, factor=case.params["shift"])
            used = torch.cat([grid[:first], tail])
        else:
            assert case["sigmas_used"][-1] > 0  # never denoised: ours refuses a tail without steps
            with pytest.raises(ValueError, match="tail of 0 steps"):
                levels.compressed_tail(grid, first, 0, factor=case.params["shift"])
        kinds = [str(kind) for kind in case.arrays["step_kind"]]
        assert [kind.lower().startswith("sde") for kind in kinds] == [i in window for i in range(len(used) - 1)]
        assert case["step_index"].tolist() == list(range(len(used) - 1))
        return {
            "sigmas_in": (error(grid, case["sigmas_in"]), 5e-7),
            "sigmas_used": (error(used, case["sigmas_used"]), 5e-7),
            "model_timesteps": (float(not is_truncated(used, 1000 * case["model_timesteps"])), 0.0),
        }

    check_all(golden("samplers_schedules"), check, lambda case: case.params["kind"] != "mixgrpo_flash_post")


def test_what_cannot_be_is_refused() -> None:
    x = torch.zeros(1, 2)
    for sigma, sigma_next in ((0.5, 0.5), (0.5, 0.6), (1.1, 0.5), (0.5, -0.1)):
        with pytest.raises(ValueError, match="smaller sigma_next"):
            dpm_solver(x, x, sigma, sigma_next)
    with pytest.raises(ValueError, match="history of 2"):
        dpm_solver(x, x, 0.5, 0.4, [Prediction(x, 0.7), Prediction(x, 0.6)], stochastic=True)


# -- DPPO's denoising steps: the posterior of DDPM, floors of the std, positions of a chain


ALPHA_BARS = ddpm.cosine_alpha_bars(20)


def test_grids() -> None:
    full, leading = ddpm.ddpm_grid(ALPHA_BARS), ddpm.ddim_grid(ALPHA_BARS, 5)
    assert full.timesteps.tolist() == list(range(19, -1, -1)) and leading.timesteps.tolist() == [16, 12, 8, 4, 0]
    for grid in (full, leading):
        assert torch.equal(grid.alpha_bar_next[:-1], grid.alpha_bar[1:]) and grid.alpha_bar_next[-1] == 1
        assert (grid.alpha_bar_next > grid.alpha_bar).all()
    with pytest.raises(ValueError, match="cannot be taken"):
        ddpm.ddim_grid(ALPHA_BARS, 21)


def test_the_last_positions_are_fine_tuned() -> None:
    assert ddpm.fine_tuned(torch.arange(5), 5, 2).tolist() == [False, False, False, True, True]
    assert ddpm.fine_tuned(torch.arange(5), 5, 5).all()
    with pytest.raises(ValueError, match="fine-tuned"):
        ddpm.fine_tuned(torch.arange(5), 5, 6)
