"""The configurations of the further tasks run as they stand, in miniature: the embedded model speaks their answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genrl.config import VLMConfig, load
from genrl.vlm.train import train
from tests.run_folders import rows

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["generation.prompts_per_iteration=4", "evaluation.questions=4", "evaluation.every=1", "checkpoint.every=2"]
SMALL += ["trackers=[]", "iterations=2", "evaluation.blind=false"]
FILES = {
    "jigsaw": [],
    "jigsaw_pair": ["task.rows=32"],
    "box": [],
    "emoji": [],
    "q_hawkeye": [],
    "time_master": [],
    "k_frames": [],
    "stable_reinforce": ["generation.prompts_per_iteration=16"],
    "spine": [],
    "lmm_r1": ["stages=[{iterations: 1, task: {name: sums}}, {iterations: 1}]"],
    "med_vl_thinker": ["task.rows=24"],
    "reg_grpo_augmented": [],
    "syn_grpo": ["synthesis.num_inference_steps=2"],
}


STAGED = ("time_master_sft", "patho_r1", "k_frames_sft", "med_vl_thinker_sft", "conan_cold_start")
"""With stages of supervised fine-tuning."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_configuration_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(ROOT / "configs" / "vlm" / f"{name}.yaml", [*SMALL, *FILES[name], f"output={tmp_path / 'run'}"])
    assert isinstance(config, VLMConfig)
    train(config)
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [0, 1, 2]
    for row in found[1:]:
        assert row["rollout/cut"] < 0.5, "answers are shorter than max_new_tokens"
        assert all(value is not None for value in row.values())
    if name == "syn_grpo":
        assert "synthesis/drawn" in found[2] and found[2]["updates"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_all_stages_of_a_configuration_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = ROOT / "configs" / "vlm" / f"{name}.yaml"
    stages = [stage.model_dump(mode="json", exclude_unset=True) | {"iterations": 1} for stage in load(file).stages]
    short = [f"stages={json.dumps(stages)}", f"iterations={len(stages)}", "task.rows=128", f"output={tmp_path / 'run'}"]
    config = load(file, [*SMALL[:-2], *short, "evaluation.blind=false"])
    assert isinstance(config, VLMConfig)
    train(config)
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == list(range(len(stages) + 1))
    taught = [part.trainer.algorithm == "sft" for part in config.parts]
    assert ["target/tokens_mean" in row for row in found[1:]] == taught
    assert all("eval/loss" in row and "eval/accuracy_mean" in row for row in found)
