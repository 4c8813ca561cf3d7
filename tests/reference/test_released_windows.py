"""Released windows, draw for draw: golden samplers_windows, exactly."""

from __future__ import annotations

import pytest

from tests.golden_cases import Case, check_all
from tests.reference.released_windows import flow_factory_steps, flow_grpo_fast_start, mixgrpo_window


def test_golden_windows(golden) -> None:
    def check(case: Case) -> dict[str, tuple[float, float]]:
        p, kind = case.params, case.params["kind"]
        if kind == "mixgrpo_window":
            windows = [
                mixgrpo_window(
                    p["group_size"],
                    p["max_timesteps"],
                    iteration=iteration,
                    strategy=p["sample_strategy"],
                    every=p["iters_per_group"],
                    stride=p.get("prog_overlap_step", 1) if p.get("prog_overlap", True) else None,
                    wrap=p.get("roll_back", True),
                    longest=p.get("max_iters_per_group"),
                    shortest=p.get("min_iters_per_group"),
                    rate=p.get("exp_decay_k", 0.1),
                    threshold=p.get("exp_decay_thre_timestep", 13),
                )
                for iteration in range(len(case["start"]))
            ]
            starts, sizes = [window.start for window in windows], [len(window) for window in windows]
            return exact(case, start=starts, size=sizes)
        if kind == "ff_sde_steps":
            pool = p["sde_steps"] or list(range(p["N"] - 1))
            chosen = [flow_factory_steps(pool, p["num_sde_steps"], seed=seed) for seed in case["seeds"].tolist()]
            noisy = [[step in steps for step in range(p["N"])] for steps in chosen]
            levels = (case["noise_levels"] > 0).tolist()
            assert set(case["noise_levels"].unique().tolist()) <= {0.0, case["noise_levels"].max().item()}
            return exact(case, selected=chosen) | {"noise_levels": (float(noisy != levels), 0.0)}
        low, high = (0, p["sample_num_steps"] // 2) if kind == "fast_branch_step" else p["range"]
        high -= p.get("size", 0)
        processes = range(len(case["start_by_process"]))
        return exact(case, start_by_process=[flow_grpo_fast_start(low, high, process=k) for k in processes])

    check_all(golden("samplers_windows"), check)


def exact(case: Case, **found: list) -> dict[str, tuple[float, float]]:
    return {name: (float(values != case[name].tolist()), 0.0) for name, values in found.items()}


def test_the_released_window_may_be_empty() -> None:
    """What `windows.moving_window` never does."""
    window = mixgrpo_window(4, 23, iteration=23 * 25, strategy="progressive", every=25, stride=1)
    assert window.start == 23 and len(window) == 0


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy must be progressive"):
        mixgrpo_window(4, 23, iteration=0, strategy="sliding", every=25)
