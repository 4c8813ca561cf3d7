"""The commands on a vision-language model's run: train, resume, evaluate, export; what they say of a wrong one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from genrl.vlm.policies.policy import Policy
from tests.cli.commands import run, words
from tests.run_folders import last_state
from tests.vlm import vlm_runs


def written(folder: Path, **changes: Any) -> str:
    """The name of a configuration file of a short run into `folder`/run."""
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(vlm_runs.settings(folder, **changes), sort_keys=False))
    return str(file)


def test_a_run_from_the_command_line(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run("train", written(tmp_path, vlm={"lora": {"rank": 2}}))
    run("resume", folder, "iterations=2")
    assert last_state(tmp_path / "run").step == 2
    printed = words(run("eval", folder, "--num-prompts", "16", "--out", str(tmp_path / "scores.json")))
    assert "right answers" in printed and "16 questions" in printed
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["questions"] == 16 and 0 <= scores["scores"]["eval/accuracy_mean"] <= 1
    run("export", folder, "--out", str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    run("export", folder, "--out", str(tmp_path / "whole"), "--full")
    assert sum(p.numel() for p in Policy(str(tmp_path / "whole")).parameters) > 800_000
    assert "is not empty" in words(run("export", folder, "--out", str(tmp_path / "whole"), code=2))


def test_a_folder_is_evaluated_by_a_configuration(tmp_path: Path) -> None:
    assert "8 questions" in words(run("eval", str(vlm_runs.MODEL), "--config", written(tmp_path)))
    assert "say what it is asked by --config FILE.yaml" in words(run("eval", str(vlm_runs.MODEL), code=2))
    file = written(tmp_path)
    assert "is not a run folder" in words(run("eval", str(vlm_runs.MODEL), "--config", file, "--best", code=2))
    for option in (["--reward", "shapes"], ["--dtype", "float16"], ["--episodes", "4"], ["--height", "64"]):
        text = words(run("eval", str(vlm_runs.MODEL), "--config", file, *option, code=2))
        assert f"{option[0]} is not for a model that answers questions: leave it out" in text


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_misspelt_function_is_refused_with_its_line(tmp_path: Path, command: str) -> None:
    text = words(run(command, written(tmp_path, trainer={"surrogate": "clib"}), code=2))
    assert re.search(r"tiny\.yaml:\d+: trainer\.surrogate\.name: found 'clib'.*did you mean clip", text)
    assert "valid" not in text.split() and not (tmp_path / "run").exists()
