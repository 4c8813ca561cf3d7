"""The command line of pages on methods in situations: which runs are made, with what, and what is kept of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import image_tokens, vlm_runs
from benchmarks.vlm_runs import situations


def test_runs_are_made_once_and_kept_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(vlm_runs, "complete", lambda run, command: made.append(command))
    file, folder = tmp_path / "kept.json", tmp_path / "runs"
    file.write_text(json.dumps({"groups_4-grpo-1": {"cpu_s": 7}}))

    def call(*arguments: str) -> None:
        monkeypatch.setattr("sys.argv", ["it", *arguments])

        def summary(run: Any, name: str) -> vlm_runs.Summary:
            return {"of": name}

        situations(None, file, "settings", image_tokens.SETTINGS, (0, 1, 2), image_tokens.plan, summary, json.dumps)

    call("train", str(folder), "--settings", "groups_4", "captions_16", "--seeds", "1")
    names = ["groups_4-dpo-1", "captions_16-grpo-1", "captions_16-dpo-1"]
    assert [command[-3] for command in made] == [f"output={folder / name}" for name in names]
    assert [command[1] for command in made] == [f"configs/vlm/ar_image_{name}.yaml" for name in ("dpo", "grpo", "dpo")]
    assert "generation.group_size=4" in made[0] and "task.rows=16" in made[1]
    assert all({"seed=1", "checkpoint.keep=1", "trackers=[]"} < set(command) for command in made)
    kept = json.loads(file.read_text())
    assert kept == {"groups_4-grpo-1": {"cpu_s": 7}} | {name: {"of": name.partition("-")[0]} for name in names}
    assert len(file.read_text().splitlines()) == 4  # one for each run, so that changes can be read
    capsys.readouterr()
    call("report")
    assert json.loads(capsys.readouterr().out) == kept
