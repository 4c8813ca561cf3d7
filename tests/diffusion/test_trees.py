"""Trees and windows as settings of Flow-GRPO: what a run draws, what it costs, what its gradient is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs

from genrl import estimate
from genrl.config import Config
from genrl.diffusion import flow_grpo
from genrl.diffusion.plans import sampling_plan, trained_steps
from genrl.diffusion.session import Session

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

GRPO = {"algorithm": "flow_grpo", "clip_range": 1e-3}
QUIET = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}}
EIGHT = {"num_inference_steps": 5, "prompts_per_iteration": 2, "group_size": 8, "batch_size": 6}


def config(folder: Path, model: Path, trainer: dict[str, Any], **changes: Any) -> Config:
    sampling = EIGHT | changes.pop("sampling", {})
    return runs.config(
        folder, model, trainer=GRPO | trainer, sampling=sampling, **{**QUIET, "iterations": 1, **changes}
    )


def run(config: Config, prepare: Callable[[Session], None] = lambda session: None) -> list[dict[str, Any]]:
    """Train in this process; the metric rows."""
    with runs.session(config) as session:
        prepare(session)
        flow_grpo.train(session, config.trainer)  # type: ignore[arg-type]
    return runs.rows(Path(config.output))


# -- cost ------------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {},
    "window": {"window": {"size": 2, "schedule": "progressive", "every": 1}},
    "window_start": {"window": {"size": 2, "schedule": "progressive", "every": 1}, "tree": {"ways": 4}},
    "one_tree": {"window": {"size": 2, "schedule": "decaying", "every": 2}, "tree": {"ways": 8}},
    "window_tree": {
        "window": {"size": 3, "schedule": "progressive", "every": 1},
        "tree": {"ways": 2, "at": "window", "noise_growth": 0.5},
    },
    "splits": {"tree": {"ways": 2, "at": [0, 1, 3], "spread": 4.0}},
    "window_and_splits": {
        "window": {"size": 1, "low": 2, "high": 4, "schedule": "progressive", "every": 1},
        "tree": {"ways": 2, "at": [0]},
    },
    "backward": {
        "window": {"size": 3, "schedule": "backward", "shortest": 1},
        "noise_outside_window": True,
        "tree": {"ways": 4, "contrast": {"low": 0.0, "high": 0.0}},
    },
    "tail": {"window": {"size": 1, "schedule": "progressive", "every": 1}, "tail_ratio": 0.5},
    "tree_and_tail": {"window": {"size": 1, "high": 1}, "tree": {"ways": 8}, "tail_ratio": 0.5},
    "sliding_prune": {"tree": {"ways": 2, "at": [0], "prune": {"depths": [3, 4], "slide_every": 1}}},
    "kl": {"tree": {"ways": 4, "at": [1]}, "kl_weight": 0.01, "inner_epochs": 2},
    "layer_tuning": {
        "window": {"size": 2, "schedule": "progressive", "every": 1},
        "tree": {"ways": 8},
        "layer_tuning": {},
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_model_calls_are_those_of_the_estimate(folder: Path, model: Path, name: str) -> None:
    """Over all iterations of a run; those of `genrl check` and `genrl plan`."""
    found = config(folder, model, SETTINGS[name], iterations=3)
    expected = estimate.plan(found, estimate.read_components(model))
    rows = run(found)
    assert sum(row["model_calls/sample"] for row in rows) == pytest.approx(3 * expected.sample_calls)
    assert sum(row["model_calls/train"] for row in rows) == pytest.approx(3 * expected.train_calls)
    for iteration, row in enumerate(rows):
        plan = sampling_plan(found, found.trainer, iteration)  # type: ignore[arg-type]
        assert row["model_calls/sample"] == 2 * plan.calls
        assert row["ratio/max_abs_dev"] == 0.0 or "kl" in row  # a second epoch is off-policy
        assert row["window/size"] == len(trained_steps(found, found.trainer, iteration))  # type: ignore[arg-type]


@pytest.mark.parametrize("in_training", [True, False])
def test_guided_calls_are_those_of_the_estimate(folder: Path, model: Path, in_training: bool) -> None:
    trainer = {
        "window": {"size": 2, "low": 1, "high": 3},
        "tree": {"ways": 8},
        "layer_tuning": {},
        "guidance_in_training": in_training,
    }
    found = config(folder, model, trainer, sampling={"guidance_scale": 4.5})
    expected = estimate.plan(found, estimate.read_components(model))
    (row,) = run(found)
    assert (row["model_calls/sample"], row["model_calls/train"]) == (expected.sample_calls, expected.train_calls)
