"""Language models trained by other optimisers, resumed to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from genrl.config import load
from genrl.runtime.run import Run
from genrl.vlm.train import train
from tests.run_folders import differences, rows
from tests.vlm import vlm_runs

RATES = {"prodigy": 1.0}


@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit", "prodigy"])
def test_resumed_to_the_bit(tmp_path: Path, name: str) -> None:
    """From the checkpoint of the first of two iterations."""
    config = vlm_runs.config(
        tmp_path, optimizer={"name": name, "lr": RATES.get(name, 1e-4)}, checkpoint={"every": 1}, iterations=2
    )
    straight = train(config)
    again = tmp_path / "again"
    shutil.copytree(straight, again)
    shutil.rmtree(again / "checkpoints" / "step-000002")
    train(load(Run(again).config), again)
    assert differences(straight, again) == []
    assert all(row["updates"] > 0 for row in rows(straight)[1:])
