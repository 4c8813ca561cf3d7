"""Several simulators in one run: tasks of one function, each an environment of its own, told apart in the metrics."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from genrl.config import load
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment
from genrl.vla.train import train
from tests.run_folders import rows

UNLIKE = """
import gymnasium

def make(task):
    return gymnasium.make(task)
"""


@pytest.mark.slow
def test_one_policy_learns_two_simulators(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(root / "docs")
    monkeypatch.syspath_prepend(root / "docs")
    monkeypatch.setattr("sys.argv", ["example_two_simulators.py", "both"])
    runpy.run_path("docs/example_two_simulators.py", run_name="__main__")
    page = (root / "docs" / "vla_simulators.md").read_text(encoding="utf-8")
    text = page.split("# both_sft.yaml")[1].split("```")[0]
    (tmp_path / "both_sft.yaml").write_text("#" + text)
    last = rows(train(load(tmp_path / "both_sft.yaml", ["trackers=[]"])))[-1]
    assert last["eval/success/go_to_the_red_corner"] > 0.8 and last["eval/success/drive_up_the_hill"] > 0.8


def test_simulators_that_are_not_alike_are_refused(tmp_path: Path) -> None:
    (tmp_path / "unlike.py").write_text(UNLIKE)
    tasks = ("MountainCarContinuous-v0", "Pendulum-v1")
    how = {"tasks": tasks, "num_envs": 2, "chunk": 1, "max_steps": 9, "success_key": None, "reward": "environment"}
    env = open_environment(Simulation(f"{tmp_path}/unlike.py:make", **how))
    with pytest.raises(ValueError, match="all tasks of a run must show the same"):
        env.reset(seed=0)
    env.close()
