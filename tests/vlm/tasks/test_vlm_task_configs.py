"""The configurations of the further tasks run as they stand, in miniature: the embedded model speaks their answers."""

import json
from pathlib import Path

import pytest

from genrl.config import load
from genrl.vlm.train import train
from tests.run_folders import rows

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["evaluation.every=0", "evaluation.blind=false", "trackers=[]"]
FEW = ["generation.prompts_per_iteration=2", "iterations=1", "checkpoint.every=1"]
FILES = {
    **dict.fromkeys(("jigsaw", "jigsaw_pair", "box", "emoji", "q_hawkeye", "time_master", "k_frames", "spine"), FEW),
    "stable_reinforce": ["generation.prompts_per_iteration=8", *FEW[1:]],
    "lmm_r1": [*FEW, "stages=[{iterations: 1, task: {name: sums}}, {iterations: 1}]", "iterations=2"],
    "med_vl_thinker": [*FEW, "task.rows=12"],
    "reg_grpo_augmented": FEW,
    "syn_grpo": [*FEW, "iterations=2", "synthesis.num_inference_steps=2"],
}
STAGED = ("time_master_sft", "patho_r1", "k_frames_sft", "med_vl_thinker_sft", "conan_cold_start")
"""With stages of supervised fine-tuning."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_configuration_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(ROOT / "configs" / "vlm" / f"{name}.yaml", [*SMALL, *FILES[name], f"output={tmp_path / 'run'}"])
    last = rows(train(config))[-1]
    assert last["rollout/cut"] < 0.5, "answers are shorter than max_new_tokens"
    assert all(value is not None for value in last.values())
    assert ("synthesis/drawn" in last) == (name == "syn_grpo")


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_all_stages_of_a_configuration_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = ROOT / "configs" / "vlm" / f"{name}.yaml"
    stages = [stage.model_dump(mode="json", exclude_unset=True) | {"iterations": 1} for stage in load(file).stages]
    short = [f"stages={json.dumps(stages)}", f"iterations={len(stages)}", "task.rows=128", f"output={tmp_path / 'run'}"]
    config = load(file, [*SMALL, *FEW[:1], *short])
    taught = [part.trainer.algorithm == "sft" for part in config.parts]
    assert ["target/tokens_mean" in row for row in rows(train(config))] == taught
