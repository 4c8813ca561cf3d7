"""Do the samplers keep the data distribution? Against velocities known in closed form.

Gaussian data: every kernel is then affine in the state, so the variance of every marginal is propagated exactly,
without sampling. Flow-CPS keeps a bias however fine the grid.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from genrl.mdp import kernels
from genrl.mdp.kernels import Transition
from tests.reference.grids import shifted_grid

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Transition]  # x, v, sigma, sigma', the grid's second value


KERNELS: dict[str, Kernel] = {
    "ode": lambda x, v, s, t, second: kernels.ode(x, v, s, t),
    "flow_sde .7": lambda x, v, s, t, second: kernels.flow_sde(x, v, s, t, noise_level=0.7, sigma_max=second),
    "flow_sde 1": lambda x, v, s, t, second: kernels.flow_sde(x, v, s, t, noise_level=1.0, sigma_max=second),
    "dance_sde .7": lambda x, v, s, t, second: kernels.dance_sde(x, v, s, t, noise_level=0.7),
    "flow_ddim 1": lambda x, v, s, t, second: kernels.flow_ddim(x, v, s, t, noise_level=1.0),
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
    "dance_sde .7": (-0.107, -0.034, -0.014, -0.0036),
    "flow_ddim 1": (-0.340, -0.138, -0.066, -0.019),
    "flow_cps .8": (-0.371, -0.258, -0.226, -0.205),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_final_std_is_the_one_of_the_table(name: str) -> None:
    for steps, want in zip((10, 40, 100, 400), TABLE[name], strict=True):
        digits = len(str(want).split(".")[1])
        got = std_errors(KERNELS[name], steps)[-1].item()
        assert got == pytest.approx(want, abs=0.5 * 10**-digits + 1e-9), f"N = {steps}"


def test_cps_and_ddim_are_exact_for_a_single_point() -> None:
    """Invariant 15: with data of std 0 every marginal has std sigma exactly; the SDEs exceed it."""
    for name in ("flow_cps .8", "flow_ddim 1", "ode"):
        assert std_errors(KERNELS[name], 10, data_std=0.0).abs().max() < 1e-12, name
    assert std_errors(KERNELS["dance_sde .7"], 10, data_std=0.0).abs().max() > 1e-2
