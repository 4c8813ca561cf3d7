"""Whole runs with each optimiser: on-policy ratios, stopped and resumed, two kinds of trained weights."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import load
from genrl.config.optimizers import OPTIMIZERS
from genrl.diffusion.train import train
from genrl.runtime.run import Run
from tests.diffusion import runs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_on_policy_and_resumed_to_the_bit(folder: Path, model: Path, name: str) -> None:
    """All weights, of which some are large enough for eight bits; ended by a signal after 2 of 3 iterations."""
    common: dict[str, Any] = {"lora": None, "iterations": 3}
    common["optimizer"] = {"name": name, "lr": 1.0 if name == "prodigy" else 1e-4, "schedule": "cosine"}

    def config(output: str, call: int) -> Any:
        rewards = [runs.reward(folder, "Interrupt", args={"number": int(signal.SIGTERM), "call": call})]
        return runs.config(folder, model, output=str(folder / output), rewards=rewards, **common)

    train(config("straight", 1000))
    with pytest.raises(SystemExit):
        train(config("stopped", 6))  # the evaluation after iteration 2
    (folder / "quiet").touch()
    train(load(Run(folder / "stopped").config), folder / "stopped")
    assert runs.differences(folder / "straight", folder / "stopped") == []

    rows = runs.rows(folder / "straight")
    assert [row["ratio/max_abs_dev"] for row in rows[1:]] == [0.0, 0.0, 0.0]
    assert [row["updates"] for row in rows[1:]] == [1.0, 1.0, 1.0]
    state = runs.last_state(folder / "straight").tensors["optimizer"]
    assert any(t.dtype == torch.uint8 for t in state.values()) == (name == "adamw_8bit")
