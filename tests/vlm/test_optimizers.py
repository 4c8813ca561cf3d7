"""Language models trained by other optimisers, resumed to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from genrl.vlm.train import train
from tests.run_folders import assert_resumes
from tests.vlm import vlm_runs

RATES = {"prodigy": 1.0}


@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit", "prodigy"])
def test_resumed_to_the_bit(tmp_path: Path, name: str) -> None:
    """From the checkpoint of the first of two iterations."""
    config = vlm_runs.config(
        tmp_path, optimizer={"name": name, "lr": RATES.get(name, 1e-4)}, checkpoint={"every": 1}, iterations=2
    )
    assert_resumes(train, config, tmp_path)
