"""The code on docs/vla.md runs, and so does what docs/vla_simulators.md says of a simulator of one's own."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from genrl.config import check_files, load
from genrl.vla.data.lerobot_dataset import open_dataset
from genrl.vla.policies.folder import save_first_steps, save_policy
from genrl.vla.policies.policy import ACTION
from tests.vla.tiny_policies import diffusion, frames

ROOT = Path(__file__).parents[2]


def test_the_code_on_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-policy").symlink_to(ROOT / "assets" / "tiny-vla")
    page = (ROOT / "docs" / "vla.md").read_text(encoding="utf-8")
    block, dppo = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "docs/vla.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 10 and any("True" in line for line in printed)
    save_policy(diffusion(seed=1), tmp_path / "dppo")
    save_first_steps(diffusion(seed=2), tmp_path / "dppo", 20, 10)
    observation = {name: value[:4] for name, value in frames().items() if name != ACTION}
    names = {"folder": tmp_path / "dppo", "observation": observation, "noise": torch.randn(4, 4, 3)}
    exec(compile(dppo, "docs/vla.md", "exec"), names)
    assert names["chunk"].shape == (4, 4, 3)


def test_demonstrations_of_the_example_fit_the_files_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.setattr("sys.argv", ["example_simulator.py", "corners"])
    runpy.run_path("docs/example_simulator.py", run_name="__main__")
    dataset = open_dataset(Path("corners"))
    assert len(dataset) == 40 and set(dataset.tasks.values()) == {"go to the red corner", "go to the blue corner"}
    assert all(episode.columns["next.success"][-1, 0] for episode in dataset.read(["next.success"]))
    page = (ROOT / "docs" / "vla_simulators.md").read_text(encoding="utf-8")
    imitation, reinforcement, _ = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "corners_sft.yaml").write_text(imitation + "trackers: []\n")
    check_files(load("corners_sft.yaml"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "corners_sft").symlink_to(ROOT / "assets" / "tiny-vla")
    (tmp_path / "corners.yaml").write_text(reinforcement + "trackers: []\n")
    check_files(load("corners.yaml"))
