"""Grids and windows: golden samplers_schedules, and what holds for any of them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.mdp import schedules, windows
from tests.golden_cases import Case, check_all, error
from tests.reference.grids import is_truncated, shifted_grid

ROUNDING = 5e-7
"""Of a few operations in float32."""


def test_golden_grids(golden) -> None:
    """Left out: those that diffusers' schedulers make on a way of their own, and MixGRPO-Flash's (test_dpm)."""

    def check(case: Case) -> dict[str, tuple[float, float]]:
        kind, steps = case.params["kind"], case.params["N"]
        if kind == "pi_rl":
            return {"sigmas": (error(schedules.linspace_grid(steps), case["timesteps"]), ROUNDING)}
        factor = case.params["shift"]
        if kind.startswith("dynamic"):
            factor = float(case["mu"]) if kind == "dynamic_linear" else math.exp(case["mu"])
        sigmas = shifted_grid(steps, factor)
        result = {"sigmas": (error(sigmas, case["sigmas"]), ROUNDING)}
        if "sigmas_f64" in case:
            result["sigmas_f64"] = error(sigmas, case["sigmas_f64"]), ROUNDING
        if "timesteps" in case:
            result["timesteps"] = error(sigmas[:-1], case["timesteps"] / 1000), ROUNDING
        else:
            result["timesteps"] = float(not is_truncated(sigmas, case["model_timesteps_int"])), 0.0
        return result

    kinds = ("pi_rl", "static_custom_sigmas", "linspace_N+1_shift", "dynamic_exponential", "dynamic_linear")
    check_all(golden("samplers_schedules"), check, lambda case: case.params["kind"] not in kinds)


@given(st.floats(0.0, 1.0), st.floats(0.1, 20.0), st.floats(0.1, 20.0))
def test_shifts_compose_and_are_undone_by_the_inverse(u: float, s: float, t: float) -> None:
    x = torch.tensor([0.0, u, 1.0], dtype=torch.float64)
    assert torch.allclose(schedules.shift(schedules.shift(x, s), t), schedules.shift(x, s * t), rtol=0, atol=1e-12)
    assert torch.allclose(schedules.shift(schedules.shift(x, s), 1 / s), x, rtol=0, atol=1e-12)


@given(st.integers(1, 8), st.integers(0, 10), st.integers(0, 10), st.integers(0, 2**31), st.integers(0, 1000))
def test_a_window_is_never_empty_and_lies_inside(size: int, low: int, extra: int, seed: int, iteration: int) -> None:
    high = low + size + extra
    window = schedules.window_steps(size, low, high, seed=seed, iteration=iteration)
    assert len(window) == size and low <= window[0] and window[-1] < high
    assert window == schedules.window_steps(size, low, high, seed=seed, iteration=iteration)


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
    grid = shifted_grid(steps, factor or 2.0)
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


@pytest.mark.parametrize(("size", "low", "high"), [(0, 0, 5), (6, 0, 5), (2, 4, 5), (1, -1, 5)])
def test_a_window_that_does_not_fit_is_refused(size: int, low: int, high: int) -> None:
    for schedule in (
        partial(schedules.window_steps, seed=0),
        partial(schedules.geometric_window, ratio=0.5, seed=0),
        partial(windows.moving_window, every=3),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            schedule(size, low, high, iteration=0)
