"""Policies in simulation trained by other optimisers: their groups, and a resume to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from genrl.vla.train import train
from tests.run_folders import assert_resumes
from tests.vla import vla_runs


@pytest.mark.parametrize("name", ["adamw_8bit", "lion", "muon"])
def test_resumed_to_the_bit(tmp_path: Path, name: str) -> None:
    """From the checkpoint of the first of two iterations."""
    config = vla_runs.config(tmp_path, optimizer={"name": name, "lr": 1e-4}, checkpoint={"every": 1}, iterations=2)
    assert_resumes(train, config, tmp_path)


def test_one_step_size_does_not_fit_two_rates(tmp_path: Path) -> None:
    config = vla_runs.config(tmp_path, optimizer={"name": "prodigy", "lr": 1.0}, iterations=1)
    with pytest.raises(ValueError, match="policy, critic have rates of their own"):
        train(config)
