"""Do the samplers keep the data distribution? Against velocities known in closed form.

Gaussian data: every kernel is then affine in the state, so the variance of every marginal is propagated exactly,
without sampling. Mixture data: Monte Carlo. Flow-CPS is expected to fail: its bias is measured and asserted to exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from genrl.mdp import gaussian, kernels, noise
from genrl.mdp.kernels import Transition
from tests.reference.grids import shifted_grid

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Transition]  # x, v, sigma, sigma', the grid's second value


def flow_sde(level: float) -> Kernel:
    return lambda x, v, s, t, second: kernels.flow_sde(x, v, s, t, noise_level=level, sigma_max=second)


def dance_sde(eta: float) -> Kernel:
    return lambda x, v, s, t, second: kernels.dance_sde(x, v, s, t, noise_level=eta)


def last_step_ode(kernel: Kernel) -> Kernel:
    def step(x: Tensor, v: Tensor, s: Tensor, t: Tensor, second: Tensor) -> Transition:
        noisy, plain = kernel(x, v, s, t, second), kernels.ode(x, v, s, t)
        last = (t == 0).reshape(-1, *[1] * (x.dim() - 1))
        return Transition(torch.where(last, plain.mean, noisy.mean), torch.where(last, 0.0, noisy.std))

    return step


KERNELS: dict[str, Kernel] = {
    "ode": lambda x, v, s, t, second: kernels.ode(x, v, s, t),
    "flow_sde .7": flow_sde(0.7),
    "flow_sde 1": flow_sde(1.0),
    "dance_sde .3, last step ODE": last_step_ode(dance_sde(0.3)),
    "dance_sde .7": dance_sde(0.7),
    "flow_ddim 1": lambda x, v, s, t, second: kernels.flow_ddim(x, v, s, t, noise_level=1.0),
    "flow_cps .5": lambda x, v, s, t, second: kernels.flow_cps(x, v, s, t, noise_level=0.5),
    "flow_cps .8": lambda x, v, s, t, second: kernels.flow_cps(x, v, s, t, noise_level=0.8),
}


def std_errors(kernel: Kernel, steps: int, data_std: float = 0.5) -> Tensor:
    """Relative error of the std of every marginal after the first, for data N(0, data_std^2) on a grid of shift 3.

    All steps at once: one sample of the batch per step of the grid.
    """
    grid = shifted_grid(steps, 3.0).double()
    sigma, sigma_next = grid[:-1], grid[1:]
    true = ((1 - grid) ** 2 * data_std**2 + grid**2).sqrt()
    slope = (sigma - (1 - sigma) * data_std**2) / true[:-1] ** 2
    step = kernel(torch.ones(steps, 1, dtype=torch.float64), slope[:, None], sigma, sigma_next, grid[1])
    variance, variances = 1.0, []
    for gain, std in zip(step.mean[:, 0].tolist(), step.std[:, 0].tolist(), strict=True):
        variance = gain**2 * variance + std**2
        variances.append(variance)
    computed = torch.tensor(variances, dtype=torch.float64).sqrt()
    return torch.where(true[1:] > 0, computed / true[1:].clamp(min=1e-300) - 1, computed)


# relative error of the final std at N = 10, 40, 100, 400 (invariant 13 of the samplers' specification)
TABLE = {
    "ode": (-0.261, -0.071, -0.029, -0.0073),
    "flow_sde .7": (-0.151, -0.041, -0.015, -0.0027),
    "flow_sde 1": (-0.093, -0.031, -0.013, -0.0032),
    "dance_sde .3, last step ODE": (None, -0.064, None, None),
    "dance_sde .7": (-0.107, -0.034, -0.014, -0.0036),
    "flow_ddim 1": (-0.340, -0.138, -0.066, -0.019),
    "flow_cps .8": (-0.371, -0.258, -0.226, -0.205),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_final_std_is_the_one_of_the_table(name: str) -> None:
    for steps, want in zip((10, 40, 100, 400), TABLE[name], strict=True):
        if want is not None:
            digits = len(str(want).split(".")[1])
            got = std_errors(KERNELS[name], steps)[-1].item()
            assert got == pytest.approx(want, abs=0.5 * 10**-digits + 1e-9), f"N = {steps}"


@pytest.mark.parametrize("name", ["ode", "flow_sde 1", "dance_sde .3, last step ODE", "dance_sde .7", "flow_ddim 1"])
def test_the_final_marginal_converges_to_first_order(name: str) -> None:
    coarse, fine = (std_errors(KERNELS[name], steps)[-1].item() for steps in (4000, 16000))
    assert coarse / fine == pytest.approx(4.0, rel=0.1)
    assert abs(fine) < 1e-3


@pytest.mark.parametrize("level", [0.5, 0.7])
def test_the_clamp_of_flow_sde_slows_its_convergence(level: float) -> None:
    """Below a = 1 the excess noise of the clamped first step fades as N^(-a^2) only, slower than the step size."""
    errors = [std_errors(flow_sde(level), steps)[-1].item() for steps in (1600, 6400, 25600)]
    without_first_order = [errors[i] - 4 * errors[i + 1] for i in range(2)]
    order = math.log(without_first_order[0] / without_first_order[1], 4)
    assert order == pytest.approx(level**2, abs=0.02)


@pytest.mark.parametrize(("level", "worst"), [(0.7, 0.046), (1.0, 0.147)])
def test_the_worst_marginal_of_flow_sde_does_not_converge(level: float, worst: float) -> None:
    """Its first std is a on every grid: marginals right after it keep an excess."""
    for steps in (400, 4000):
        assert std_errors(flow_sde(level), steps).abs().max().item() == pytest.approx(worst, abs=2e-3)


@pytest.mark.parametrize(("name", "bias"), [("flow_cps .5", -0.08), ("flow_cps .8", -0.19)])
def test_cps_keeps_a_bias_however_fine_the_grid(name: str, bias: float) -> None:
    coarse, fine = (std_errors(KERNELS[name], steps)[-1].item() for steps in (4000, 16000))
    assert fine == pytest.approx(bias, abs=0.01)
    assert abs(coarse - fine) < 0.02 * abs(fine)


def test_cps_and_ddim_are_exact_for_a_single_point() -> None:
    """Invariant 15: with data of std 0 every marginal has std sigma exactly; the SDEs exceed it."""
    for name in ("flow_cps .5", "flow_cps .8", "flow_ddim 1", "ode"):
        assert std_errors(KERNELS[name], 10, data_std=0.0).abs().max() < 1e-12, name
    assert std_errors(KERNELS["dance_sde .7"], 10, data_std=0.0).abs().max() > 1e-2


# Mixture -------------------------------------------------------------------------------------------------------------

WEIGHTS, MEANS, STDS = (torch.tensor(v, dtype=torch.float64) for v in ([0.3, 0.7], [-1.0, 0.8], [0.3, 0.2]))


def mixture_velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """E[noise - data | x]: the components' optimal velocities, weighted by their posterior."""
    centre, variance = (1 - sigma) * MEANS, (1 - sigma) ** 2 * STDS**2 + sigma**2
    log_weight = WEIGHTS.log() - 0.5 * variance.log() - (x - centre) ** 2 / (2 * variance)
    velocity = (sigma - (1 - sigma) * STDS**2) / variance * (x - centre) - MEANS
    return (log_weight.softmax(dim=-1) * velocity).sum(dim=-1, keepdim=True)


def mixture_quantiles(count: int) -> Tensor:
    points = torch.linspace(-4, 4, 400_001, dtype=torch.float64)
    cdf = (WEIGHTS * torch.special.ndtr((points[:, None] - MEANS) / STDS)).sum(dim=1)
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return points[torch.searchsorted(cdf, levels)]


def distance_to_data(kernel: Kernel, key: str) -> tuple[float, float]:
    """(Wasserstein-1 distance, share of the right-hand component) of 40 000 samples made in 200 steps."""
    count, grid = 40_000, shifted_grid(200, 3.0).double()
    x = noise.keyed_noise((count, 1), "mixture", key, "start").double()
    for i in range(200):
        step = kernel(x, mixture_velocity(x, grid[i]), grid[i], grid[i + 1], grid[1])
        x = gaussian.sample(step.mean, step.std, noise.keyed_noise((count, 1), "mixture", key, i))
    distance = (x[:, 0].sort().values - mixture_quantiles(count)).abs().mean().item()
    return distance, (x > 0).double().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("ode", KERNELS["ode"]),
        ("flow_sde .7", flow_sde(0.7)),
        ("flow_sde 1", flow_sde(1.0)),
        ("dance_sde .3", last_step_ode(dance_sde(0.3))),
        ("dance_sde .7", last_step_ode(dance_sde(0.7))),
    ],
)
def test_samplers_reach_a_mixture(name: str, kernel: Kernel) -> None:
    distance, right = distance_to_data(kernel, name)
    print(f"{name}: W1 {distance:.4f}, right-hand share {right:.3f}")
    assert distance < 0.015
    assert right == pytest.approx(0.7, abs=0.015)


@pytest.mark.slow
def test_cps_misses_the_mixture_by_its_known_bias() -> None:
    distance, right = distance_to_data(KERNELS["flow_cps .8"], "flow_cps .8")
    print(f"flow_cps .8: W1 {distance:.4f}, right-hand share {right:.3f}")
    assert distance == pytest.approx(0.13, abs=0.02)
    assert right == pytest.approx(0.76, abs=0.02)
