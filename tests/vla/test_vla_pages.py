"""The code, commands and sizes on the pages of robot policies are as they stand there: vla.md, vla_robot.md with
small numbers, vla_simulators.md, vla_data.md, vla_policies.md.
"""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from genrl.cli.app import app
from genrl.config import check_files, load
from genrl.config.plugins import import_file
from genrl.vla.data.lerobot_dataset import open_dataset
from genrl.vla.policies.folder import load_policy, save_first_steps, save_policy
from genrl.vla.policies.policy import ACTION
from tests.vla.published import pi_folder, pi_observation
from tests.vla.tiny_policies import diffusion, frames

ROOT = Path(__file__).parents[2]


def test_the_code_of_vla_runs(
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


EXAMPLE = ROOT / "docs" / "example_robot.py"
SMALL = ["trainer.steps_per_iteration=2", "trainer.batch_size=8", "iterations=1", "trackers=[]"]


def test_every_command_of_robot_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("docs", "assets"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    page = (ROOT / "docs" / "vla_robot.md").read_text(encoding="utf-8")
    (settings,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    Path("robot.yaml").write_text(settings)
    robot = import_file(EXAMPLE)
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert [shlex.split(line)[1] for line in lines].count("train") == 2 and len(lines) == 8
    for line in lines:
        words = re.sub(r"--episodes \d+", "--episodes 6", line).split()
        if words[0] == "genrl":
            found = CliRunner().invoke(app, [*words[1:], *(SMALL if words[1] == "train" else [])])
            assert found.exit_code == 0, (line, found.output)
        else:
            robot.main(words[2:])
    said = capsys.readouterr().out
    assert "demos: 6 demonstrations" in said and re.search(r"my-policy: \d of 6 succeed, 0\.\d+ to [01]\.\d+", said)
    parts = [list(open_dataset(Path(name)).read()) for name in ("demos", "corrections", "both")]
    assert len(parts[2]) == len(parts[0]) + len(parts[1]) and 0 < len(parts[1]) < 6
    for joined, one in zip(parts[2], parts[0] + parts[1], strict=True):
        assert joined.instructions == one.instructions
        assert all(np.array_equal(value, one.columns[name]) for name, value in joined.columns.items())
    assert (tmp_path / "my-policy-2" / "model.safetensors").is_file()


DATA_PAGE = ROOT / "docs" / "vla_data.md"


def test_the_code_of_data_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", DATA_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), str(DATA_PAGE), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "20 10 ['observation.image'] put the blue block in the far zone"
    assert "'action': (" in printed[1] and "'action_is_pad': (" in printed[1]
    assert printed[3:5] == ["21 (21, 6)", "23 (23, 6)"]
    assert "'success-00.gif'" in printed[5] and "'sheet.png'" in printed[5]
    assert printed[6].startswith("(0.8388") and printed[6].endswith(", 1.0)")


POLICIES_PAGE = ROOT / "docs" / "vla_policies.md"


def test_the_code_of_policies_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    pi_folder(tmp_path / "published")
    seen = pi_observation(1)
    seen["observation.image"] = seen.pop("observation.images.base_0_rgb")
    (block,) = re.findall(r"```python\n(.*?)```", POLICIES_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"FOLDER": "published", "observation": seen, "x": torch.randn(1, 6, 32), "sigma": torch.ones(1)}
    exec(compile(block, str(POLICIES_PAGE), "exec"), names)
    assert names["velocity"].shape == (1, 6, 32)
    again = load_policy(tmp_path / "fine-tuned")
    assert again.critic and again.inputs == names["policy"].inputs


def test_the_sizes_of_policies_follow_from_it() -> None:
    page = POLICIES_PAGE.read_text(encoding="utf-8")
    sizes = (("pi0", 18, 256, 256, 48), ("pi0.5", 18, 256, 256, 200), ("SmolVLA", 16, 5 * 64, 64, 49))
    for name, layers, keys, picture, rest in sizes:
        places = [picture * cameras + rest for cameras in (1, 2, 3)]
        numbers = 2 * layers * keys * places[-1]
        row = f"| {name} | {' / '.join(map(str, places))} | {numbers * 4 / 1e6:.1f} MB | {numbers * 2 / 1e6:.1f} MB |"
        assert row in page
