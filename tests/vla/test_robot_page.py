"""docs/vla_robot.md as it stands, with small numbers: its commands on the stand-in robot, and where the robot is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from genrl.cli.app import app
from genrl.config.plugins import import_file
from genrl.vla.data.lerobot_dataset import open_dataset

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "example_robot.py"
SMALL = ["trainer.steps_per_iteration=2", "trainer.batch_size=8", "iterations=1", "trackers=[]"]


def test_every_command_of_the_page_runs(
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
