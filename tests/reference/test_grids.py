"""Grids of diffusers and of the released trainers: golden samplers_schedules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from genrl.mdp import schedules
from tests.golden_cases import Case, check_all, error
from tests.reference.grids import dynamic_mu, model_timesteps, sd3_grid, shifted_grid, unipc_flow_grid


def grid(case: Case) -> Tensor:
    kind, steps, options = case.params["kind"], case.params["N"], case.params
    if kind == "static_default":
        return sd3_grid(steps, options["shift"])
    if kind == "unipc_flow_sigmas":
        return unipc_flow_grid(steps, options["flow_shift"])
    if kind in ("static_custom_sigmas", "linspace_N+1_shift"):
        return shifted_grid(steps, options["shift"])
    if kind == "pi_rl":
        return schedules.linspace_grid(steps)
    mu = dynamic_mu(
        options["seq_len"],
        base_shift=options["base_shift"],
        max_shift=options["max_shift"],
        base_tokens=options["base_image_seq_len"],
        max_tokens=options["max_image_seq_len"],
    )
    assert abs(mu - float(case["mu"])) <= 1e-12
    factor = mu if kind == "dynamic_linear" else math.exp(mu)
    return shifted_grid(steps, factor, terminal=options.get("shift_terminal"))


def test_golden_grids(golden) -> None:
    def check(case: Case) -> dict[str, tuple[float, float]]:
        kind = case.params["kind"]
        if kind == "mu":
            flux = dynamic_mu(case.params["seq_len"])
            qwen = dynamic_mu(case.params["seq_len"], max_shift=0.9, max_tokens=8192)
            return {
                "mu_flux": (abs(flux - float(case["mu_flux"])), 1e-12),
                "mu_qwen": (abs(qwen - float(case["mu_qwen"])), 1e-12),
            }
        sigmas = grid(case)
        name = "timesteps" if kind == "pi_rl" else "sigmas"
        result = {"sigmas": (error(sigmas, case[name]), 2e-7)}
        if "sigmas_f64" in case:
            result["sigmas_f64"] = error(sigmas, case["sigmas_f64"]), 2e-7
        if "sigma_min_after_ctor" in case:
            lowest = schedules.shift(torch.tensor(0.001), case.params["shift"])
            result["sigma_min"] = error(lowest, case["sigma_min_after_ctor"].float().squeeze()), 2e-7
        if "model_timesteps_int" in case:
            times = model_timesteps(sigmas, integer=True)
            result["model_timesteps"] = error(times, case["model_timesteps_int"]), 0.0
        elif kind != "pi_rl":
            times = model_timesteps(sigmas, integer=case["timesteps"].dtype == torch.int64)
            # in units of sigma: the released terminal stretch rounds 1 - q in float32, ours in float64
            result["timesteps"] = error(times / 1000, case["timesteps"] / 1000), 2e-7
        return result

    # left out: MixGRPO-Flash's grids (tests/mdp/test_dpm.py)
    check_all(golden("samplers_schedules"), check, lambda case: case.params["kind"] == "mixgrpo_flash_post")


@pytest.mark.parametrize("steps", [1, 2, 10, 28, 50])
@pytest.mark.parametrize("factor", [1.0, 3.0, 7.0, math.exp(0.63)])
def test_a_grid_falls_strictly_from_one_to_zero(steps: int, factor: float) -> None:
    for sigmas in (
        shifted_grid(steps, factor),
        shifted_grid(steps, factor, terminal=0.02) if steps > 1 else schedules.linspace_grid(1),
        sd3_grid(steps, factor),
        unipc_flow_grid(steps, factor),
    ):
        assert sigmas.shape == (steps + 1,) and sigmas.dtype == torch.float32
        assert 1.0 - 2e-6 <= sigmas[0] <= 1.0 and sigmas[-1] == 0.0
        assert (sigmas[1:] < sigmas[:-1]).all()


def test_the_default_sd3_grid_is_pinned() -> None:
    """It must not change with the installed diffusers, whose double shift is an open issue there."""
    sigmas = sd3_grid(4)
    want = torch.tensor([1.0, 0.8577, 0.6022, 0.00892857, 0.0])
    assert torch.allclose(sigmas, want, atol=5e-5) and abs(sigmas[3] - want[3]) < 1e-8
    assert torch.allclose(sd3_grid(40)[-2], sigmas[-2])


def test_the_terminal_is_reached() -> None:
    sigmas = shifted_grid(10, 2.0, terminal=0.02)
    assert sigmas[-2] == pytest.approx(0.02, abs=1e-7) and sigmas[0] == 1.0


def test_a_non_positive_shift_or_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="exp\\(mu\\)"):
        shifted_grid(10, -0.5)
    for make in (schedules.linspace_grid, sd3_grid, unipc_flow_grid):
        with pytest.raises(ValueError, match="at least one step"):
            make(0)
