"""Grids and windows: golden samplers_schedules, and what holds for any grid."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp import schedules, windows
from tests.golden_cases import Case, check_all, error


def grid(case: Case) -> Tensor:
    kind, steps, options = case.params["kind"], case.params["N"], case.params
    if kind == "static_default":
        return schedules.sd3_grid(steps, options["shift"])
    if kind == "unipc_flow_sigmas":
        return schedules.unipc_flow_grid(steps, options["flow_shift"])
    if kind in ("static_custom_sigmas", "linspace_N+1_shift"):
        return schedules.linspace_grid(steps, options["shift"])
    if kind == "pi_rl":
        return schedules.linspace_grid(steps)
    mu = schedules.dynamic_mu(
        options["seq_len"],
        base_shift=options["base_shift"],
        max_shift=options["max_shift"],
        base_tokens=options["base_image_seq_len"],
        max_tokens=options["max_image_seq_len"],
    )
    assert abs(mu - float(case["mu"])) <= 1e-12
    factor = mu if kind == "dynamic_linear" else math.exp(mu)
    return schedules.linspace_grid(steps, factor, terminal=options.get("shift_terminal"))


def test_golden_grids(golden) -> None:
    def check(case: Case) -> dict[str, tuple[float, float]]:
        kind = case.params["kind"]
        if kind == "mu":
            flux = schedules.dynamic_mu(case.params["seq_len"])
            qwen = schedules.dynamic_mu(case.params["seq_len"], max_shift=0.9, max_tokens=8192)
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
            times = schedules.model_timesteps(sigmas, integer=True)
            result["model_timesteps"] = error(times, case["model_timesteps_int"]), 0.0
        elif kind != "pi_rl":
            times = schedules.model_timesteps(sigmas, integer=case["timesteps"].dtype == torch.int64)
            # in units of sigma: the released terminal stretch rounds 1 - q in float32, ours in float64
            result["timesteps"] = error(times / 1000, case["timesteps"] / 1000), 2e-7
        return result

    reason = "MixGRPO-Flash's truncated regridding: the multistep solver is another part"

    def left_out(case: Case) -> str | None:
        return reason if case.params["kind"] == "mixgrpo_flash_post" else None

    check_all(golden("samplers_schedules"), check, left_out, {f"c{i:03d}": reason for i in range(31, 35)})


@pytest.mark.parametrize("steps", [1, 2, 10, 28, 50])
@pytest.mark.parametrize("factor", [1.0, 3.0, 7.0, math.exp(0.63)])
def test_a_grid_falls_strictly_from_one_to_zero(steps: int, factor: float) -> None:
    for sigmas in (
        schedules.linspace_grid(steps, factor),
        schedules.linspace_grid(steps, factor, terminal=0.02) if steps > 1 else schedules.linspace_grid(1),
        schedules.sd3_grid(steps, factor),
        schedules.unipc_flow_grid(steps, factor),
    ):
        assert sigmas.shape == (steps + 1,) and sigmas.dtype == torch.float32
        assert 1.0 - 2e-6 <= sigmas[0] <= 1.0 and sigmas[-1] == 0.0
        assert (sigmas[1:] < sigmas[:-1]).all()


@given(st.floats(0.0, 1.0), st.floats(0.1, 20.0), st.floats(0.1, 20.0))
def test_shifts_compose_and_are_undone_by_the_inverse(u: float, s: float, t: float) -> None:
    x = torch.tensor([0.0, u, 1.0], dtype=torch.float64)
    assert torch.allclose(schedules.shift(schedules.shift(x, s), t), schedules.shift(x, s * t), rtol=0, atol=1e-12)
    assert torch.allclose(schedules.shift(schedules.shift(x, s), 1 / s), x, rtol=0, atol=1e-12)


def test_the_default_sd3_grid_is_pinned() -> None:
    """It must not change with the installed diffusers, whose double shift is an open issue there."""
    sigmas = schedules.sd3_grid(4)
    want = torch.tensor([1.0, 0.8577, 0.6022, 0.00892857, 0.0])
    assert torch.allclose(sigmas, want, atol=5e-5) and abs(sigmas[3] - want[3]) < 1e-8
    assert torch.allclose(schedules.sd3_grid(40)[-2], sigmas[-2])


def test_the_terminal_is_reached() -> None:
    sigmas = schedules.linspace_grid(10, 2.0, terminal=0.02)
    assert sigmas[-2] == pytest.approx(0.02, abs=1e-7) and sigmas[0] == 1.0


def test_a_non_positive_shift_or_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="exp\\(mu\\)"):
        schedules.linspace_grid(10, -0.5)
    for make in (schedules.linspace_grid, schedules.sd3_grid, schedules.unipc_flow_grid):
        with pytest.raises(ValueError, match="at least one step"):
            make(0)


@given(st.integers(1, 8), st.integers(0, 10), st.integers(0, 10), st.integers(0, 2**31), st.integers(0, 1000))
def test_a_window_is_never_empty_and_lies_inside(size: int, low: int, extra: int, seed: int, iteration: int) -> None:
    high = low + size + extra
    window = schedules.window_steps(size, low, high, seed=seed, iteration=iteration)
    assert len(window) == size and low <= window[0] and window[-1] < high
    assert window == schedules.window_steps(size, low, high, seed=seed, iteration=iteration)


def test_every_window_position_is_visited_about_equally() -> None:
    starts = [schedules.window_steps(2, 1, 7, seed=5, iteration=i).start for i in range(2000)]
    counts = torch.bincount(torch.tensor(starts), minlength=6)
    assert counts[0] == 0 and counts[6:].sum() == 0
    assert (counts[1:6] - 400).abs().max() < 5 * 18  # five standard deviations of a binomial(2000, 1/5)


@pytest.mark.parametrize(("size", "low", "high"), [(0, 0, 5), (6, 0, 5), (2, 4, 5), (1, -1, 5)])
def test_a_window_that_does_not_fit_is_refused(size: int, low: int, high: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        schedules.window_steps(size, low, high, seed=0, iteration=0)


def test_early_starts_of_a_geometric_window_are_more_likely() -> None:
    draw = partial(schedules.geometric_window, 3, 1, 8, ratio=0.5, seed=3)
    starts = torch.tensor([draw(iteration=i).start for i in range(2000)])
    law = torch.tensor(windows.geometric_start_probabilities(5, 0.5))
    counts = torch.bincount(starts, minlength=6)
    assert counts[0] == 0 and len(counts) == 6
    assert ((counts[1:] - 2000 * law).abs() < 5 * (2000 * law * (1 - law)).sqrt()).all()
    assert draw(iteration=7) == draw(iteration=7) and len(draw(iteration=7)) == 3


@pytest.mark.parametrize("factor", [None, 1.0, 3.0])
@given(steps=st.integers(2, 40), data=st.data())
def test_a_compressed_tail_begins_where_it_is_told_and_ends_at_0(factor: float | None, steps: int, data) -> None:
    grid = schedules.linspace_grid(steps, factor or 2.0)
    start = data.draw(st.integers(0, steps - 1))
    count = data.draw(st.integers(1, steps - start))
    tail = schedules.compressed_tail(grid, start, count, factor=factor)
    assert tail.shape == (count + 1,) and tail.dtype == torch.float32
    assert tail[0] == grid[start] and tail[-1] == 0 and (tail[1:] < tail[:-1]).all()
    if count == steps - start:
        assert torch.allclose(tail, grid[start:], rtol=0, atol=2e-7)
    for wrong in (0, steps - start + 1):
        with pytest.raises(ValueError, match="cannot replace"):
            schedules.compressed_tail(grid, start, wrong, factor=factor)


@pytest.mark.parametrize(("size", "low", "high"), [(0, 0, 5), (6, 0, 5)])
def test_a_window_that_does_not_fit_is_refused_by_every_schedule(size: int, low: int, high: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        windows.moving_window(size, low, high, iteration=0, hold=lambda start: 3)
    with pytest.raises(ValueError, match="does not fit"):
        schedules.geometric_window(size, low, high, ratio=0.5, seed=0, iteration=0)
