"""Grids of diffusers and of the released trainers: golden samplers_schedules."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genrl.mdp import schedules
from tests.golden_cases import Case, check_all, error
from tests.reference.grids import dynamic_mu, is_truncated, sd3_grid, shifted_grid, unipc_flow_grid

ROUNDING = 5e-7
"""Of a few operations in float32."""


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
        result = {"sigmas": (error(sigmas, case[name]), ROUNDING)}
        if "sigmas_f64" in case:
            result["sigmas_f64"] = error(sigmas, case["sigmas_f64"]), ROUNDING
        if "sigma_min_after_ctor" in case:
            lowest = schedules.shift(torch.tensor(0.001), case.params["shift"])
            result["sigma_min"] = error(lowest, case["sigma_min_after_ctor"].float().squeeze()), ROUNDING
        if "model_timesteps_int" in case:
            result["model_timesteps"] = float(not is_truncated(sigmas, case["model_timesteps_int"])), 0.0
        elif kind != "pi_rl" and case["timesteps"].dtype == torch.int64:
            result["timesteps"] = float(not is_truncated(sigmas, case["timesteps"])), 0.0
        elif kind != "pi_rl":
            # in units of sigma: the released terminal stretch rounds 1 - q in float32, ours in float64
            result["timesteps"] = error(sigmas[:-1], case["timesteps"] / 1000), ROUNDING
        return result

    # left out: MixGRPO-Flash's grids (tests/mdp/test_dpm.py)
    check_all(golden("samplers_schedules"), check, lambda case: case.params["kind"] == "mixgrpo_flash_post")
