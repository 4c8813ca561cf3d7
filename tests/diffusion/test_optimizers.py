"""Whole runs with each optimiser: on-policy ratios, and resumed."""

from pathlib import Path

import pytest
import torch

from genrl.config.sections import OPTIMIZERS
from genrl.diffusion.train import train
from tests.diffusion import runs

FAST = ("adamw", "adamw_8bit", "muon")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in sorted(OPTIMIZERS)]
)
def test_on_policy_and_resumed_to_the_bit(folder: Path, model: Path, name: str) -> None:
    """All weights, of which some are large enough for eight bits."""
    optimizer = {"name": name, "lr": 1.0 if name == "prodigy" else 1e-4, "schedule": "cosine"}
    run = train(runs.config(folder, model, lora=None, optimizer=optimizer, evaluation={"every": 0}))
    assert runs.differences(run, runs.resumed(run, folder, 1)) == []
    rows = runs.rows(run)
    assert [(row["ratio/max_abs_dev"], row["updates"]) for row in rows] == [(0.0, 1.0)] * 2
    state = runs.last_state(run).tensors["optimizer"]
    assert any(t.dtype == torch.uint8 for t in state.values()) == (name == "adamw_8bit")
