"""A run that trains nothing says so at once, and ends with the reason after some iterations."""

import math
from pathlib import Path
from typing import Any

import pytest

from genrl.diffusion.config.schema import Config
from genrl.diffusion.train import train
from genrl.vla.config.schema import VLAConfig
from genrl.vlm.config.schema import VLMConfig
from tests.diffusion import runs
from tests.diffusion.conftest import model as model
from tests.runtime.loop.loops import backward, loop

REWARDS = """
def never(images):
    return [float("nan")] * len(images)

def rounding(images):
    return [0.5 + 1e-17 * k for k in range(len(images))]

def huge(images):
    return [1e308 - k for k in range(len(images))]"""


@pytest.mark.parametrize("name", ["never", "rounding", "huge"])
def test_a_reward_that_tells_nothing_ends_the_run(name: str, model: Path, tmp_path: Path, caplog: Any) -> None:
    runs.write_folder(tmp_path)
    (tmp_path / "flat.py").write_text(REWARDS)
    rewards = [{"name": f"{tmp_path / 'flat.py'}:{name}"}]
    changes = {"evaluation": {"every": 0}, "iterations": 9, "idle_iterations": 2}
    config = runs.config(tmp_path, model, rewards=rewards, **changes)
    with pytest.raises(RuntimeError, match="the last 2 iterations changed no weight.*idle_iterations=null") as error:
        train(config)
    scored = name == "rounding"
    assert ("all samples have the same reward" if scored else f"no sample had a score; {name} gave none") in str(error)
    why = "in every group all samples have the same reward" if scored else "no sample had a score"
    assert f"iteration 1 taught nothing: {why}" in caplog.text
    rows = runs.rows(tmp_path / "run")
    assert len(rows) == 2 and not (tmp_path / "run" / "lora").exists()
    failed = rows[0][f"reward/{name}_failed"]
    assert (rows[0]["zero_std_ratio"] == 1.0 and failed == 0) if scored else failed > 0


def test_what_changes_nothing_is_said_and_only_iterations_in_a_row_count(tmp_path: Path, caplog: Any) -> None:
    """A method that makes no step, and one that steps along a gradient of 0; not one that learns."""
    one = loop(tmp_path)
    one.finish({})
    for gradient in (0.0, 1.0):
        one.optimization.updates = 1
        one.finish({"grad_norm": gradient})
    messages = [record.getMessage() for record in caplog.records if "taught nothing" in record.getMessage()]
    assert messages == [
        "iteration 1 taught nothing: its method made no optimiser step",
        "iteration 2 taught nothing: the gradient was 0",
    ]
    one = loop(tmp_path / "rows")
    one.config.iterations = 40
    for _ in range(2):
        for _ in range(4):
            one.finish({})
        backward(one, policy=1.0)
        one.optimization.step(["policy"])
        one.finish({})
        for _ in range(4):
            one.finish({})
        one.optimization.other_updates = 1
        one.finish({})
    one.config.idle_iterations = None
    for _ in range(10):
        one.finish({"reward/total_mean": math.nan})
    one.config.idle_iterations = 11
    with pytest.raises(RuntimeError, match="the last 11 iterations"):
        one.finish({})
    assert all(kind.model_fields["idle_iterations"].default == 5 for kind in (Config, VLAConfig, VLMConfig))
