"""The commands on a vision-language model's run: train, resume, evaluate, export; what they say of a wrong one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from click.testing import Result
from typer.testing import CliRunner

from genrl.cli.app import app
from genrl.vlm.policies.policy import Policy
from tests.run_folders import last_state
from tests.vlm import vlm_runs


def genrl(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def said(result: Result) -> str:
    """What was printed, without the frame and its line breaks."""
    return re.sub(r"[│\s]+", " ", result.output)


def test_a_run_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(vlm_runs.settings(tmp_path, vlm={"lora": {"rank": 2}})))
    run = str(tmp_path / "run")
    assert genrl("train", str(file)).exit_code == 0
    assert genrl("resume", run, "iterations=2").exit_code == 0
    assert last_state(tmp_path / "run").step == 2

    found = genrl("eval", run, "--num-prompts", "16", "--out", str(tmp_path / "scores.json"))
    assert found.exit_code == 0 and "right answers" in said(found) and "16 questions" in said(found)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["questions"] == 16 and 0 <= scores["scores"]["eval/accuracy_mean"] <= 1

    assert genrl("export", run, "--out", str(tmp_path / "adapter")).exit_code == 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert genrl("export", run, "--out", str(tmp_path / "whole"), "--full").exit_code == 0
    assert sum(p.numel() for p in Policy(str(tmp_path / "whole")).parameters) > 800_000
    refused = genrl("export", run, "--out", str(tmp_path / "whole"))
    assert refused.exit_code == 2 and "is not empty" in said(refused)


def test_a_folder_is_evaluated_by_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(vlm_runs.settings(tmp_path)))
    found = genrl("eval", str(vlm_runs.MODEL), "--config", str(file))
    assert found.exit_code == 0 and "8 questions" in said(found)
    assert "say what it is asked by --config FILE.yaml" in said(genrl("eval", str(vlm_runs.MODEL)))


def test_a_misspelt_function_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(vlm_runs.settings(tmp_path, trainer={"surrogate": "clib"}), sort_keys=False))
    refused = genrl("train", str(file))
    assert refused.exit_code == 2
    assert re.search(r"tiny\.yaml:\d+: trainer\.surrogate\.name: found 'clib'.*did you mean clip", said(refused))
    assert not (tmp_path / "run").exists()
