"""Talk2Move's recipes on Qwen-Image-Edit, rehearsed on a tiny one: all stays but sizes and detectors."""

from pathlib import Path

import pytest

from genrl.config import load
from genrl.diffusion.config.estimate import plan, read_components
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy import decoding
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.rewards import tiny_orient

RECIPES = Path(__file__).parents[3] / "configs/diffusion"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-qwen-edit"
    FAMILIES["qwen_image_edit"]().pipe.save_pretrained(folder)
    return folder


def rehearsal(name: str, qwen: Path, folder: Path, group: int, rewards: str) -> Config:
    """The recipe on a tiny model, with 32 pixels, two prompts and groups of 2, for one iteration."""
    changes = [
        *(f"model.path={qwen}", "model.dtype=float32", "model.lora.rank=4"),
        *("sampling.height=32", "sampling.width=32", "evaluation.every=0", "iterations=1", f"output={folder / 'run'}"),
        *("sampling.prompts_per_iteration=2", f"sampling.group_size={group}", "sampling.batch_size=2"),
        "sampling.pipeline_args={true_cfg_scale: 4.0, negative_prompt: ' ', max_sequence_length: 48}",
        f"rewards={rewards}",
    ]
    if name != "qwen_image_edit_talk2move_sft":
        changes.append("trainer.updates_per_iteration=1")  # the second is off the policy that drew
    return load(RECIPES / f"{name}.yaml", changes)


BRIGHT = "{{name: '{folder}/rewards.py:brightness', weight: 1.0}}"


def test_a_recipe_trains(qwen: Path, folder: Path) -> None:
    """On policy the ratio is exactly 1; calls are those of the plan; each reward is logged under its name.

    A tiny random model draws nothing that can be found, so brightness stands beside the rewards to have a gradient.
    """
    file, backbone = tiny_orient.save(folder)
    orient = f"{{name: edit_orient, weight: 0.9, args: {{model: {file}, backbone: {backbone}, detector: shapes}}}}"
    position = "{name: edit_position, weight: 0.1, args: {detector: shapes}}"
    rewards = f"[{BRIGHT.format(folder=folder)}, {orient}, {position}]"
    chosen = rehearsal("qwen_image_edit_talk2move_rotate", qwen, folder, 2, rewards)
    (row,) = runs.rows(train(chosen))
    predicted = plan(chosen, read_components(qwen))
    assert row["ratio/max_abs_dev"] == 0.0 and row["grad_norm"] > 0 and row["window/size"] == 9
    assert (row["model_calls/sample"], row["model_calls/train"]) == (predicted.sample_calls, predicted.train_calls)
    assert row["model_calls/sample"] == 2 * 2 * 2 * (9 + 1)  # true guidance doubles it
    assert row["reward/edit_orient_mean"] == row["reward/edit_position_mean"] == 0.0


def test_the_start_is_trained_without_guidance(qwen: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for each picture, where sampling takes two for each step."""
    monkeypatch.setattr(decoding, "MOST", 10.0)  # the autoencoder is random: it need not give pictures back
    bright = f"[{BRIGHT.format(folder=folder)}]"
    chosen = rehearsal("qwen_image_edit_talk2move_sft", qwen, folder, 1, bright)
    (row,) = runs.rows(train(chosen))
    assert row["model_calls/train"] == plan(chosen, read_components(qwen)).train_calls == 2
    assert row["grad_norm"] > 0
