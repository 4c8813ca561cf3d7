"""The recipes for published data sets: they read rows of the right columns, judge hard answers, and run end to end."""

import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from genrl.config import load
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import open_rewards
from genrl.vlm.train import train
from genrl_rewards.scorers.texts.completions import score_completions
from tests.run_folders import rows
from tests.vlm import tiny_checkpoints
from tests.vlm.rollout.recipe_rows import SAMPLES, written

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "vlm" / "data"
SMALL = ["vlm.lora=null", "vlm.dtype=float32", "vlm.gradient_checkpointing=false", "task.system=null"]
SMALL += ["generation.prompts_per_iteration=4", "generation.group_size=2", "generation.batch_size=null"]
SMALL += ["generation.max_new_tokens=6", "trainer.micro_batch=8", "evaluation.every=1", "checkpoint.every=1"]
SMALL += ["iterations=1", "trackers=[]", "task.min_pixels=256", "task.max_pixels=1024"]


def recipe(name: str, folder: Path, *more: str) -> VLMConfig:
    data = [f"task.train={folder}:train", f"task.eval={folder}:test", f"output={folder / 'run'}"]
    found = load(FOLDER / f"{name}.yaml", [*SMALL, *data, *more])
    assert isinstance(found, VLMConfig)
    return found


def test_every_recipe_has_sample_rows() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_right_answers_score_more_than_wrong_ones_and_no_row_ends_the_scoring(name: str, tmp_path: Path) -> None:
    sample = written(name, tmp_path)
    config = recipe(name, tmp_path, "vlm.path=assets/tiny-vlm")
    if config.rewards[0].name.startswith("math"):
        pytest.importorskip("math_verify")
    questions = Questions(config, "train")
    reward = open_rewards(config)[config.reward_labels[0]]
    found = [questions[k] for k in range(len(questions))]
    assert len(found) == len(sample.answers)
    for place, right in ((0, True), (1, False)):
        said = [f"<answer>{pair[place] if pair else 3}</answer>" for pair in sample.answers]
        columns = {key: [row.columns[key] for row in found] for key in found[0].columns}
        scores = score_completions(reward, prompts=[""] * len(said), completions=said, columns=columns).values
        for pair, value in zip(sample.answers, scores, strict=True):
            assert math.isnan(value) if pair is None else (value >= config.evaluation.right_at) is right, (pair, value)


def texts(name: str, folder: Path) -> list[tuple[Any, ...]]:
    written(name, folder)
    questions = Questions(recipe(name, folder, "vlm.path=assets/tiny-vlm"), "train")
    asked = (questions[k].prompt.parts for k in range(len(questions)))
    return [tuple("picture" if isinstance(part, Image.Image) else part for part in parts) for parts in asked]


def test_questions_are_worded_with_their_options_and_pictures_in_place(tmp_path: Path) -> None:
    geometry = texts("geometry3k", tmp_path)
    assert geometry[0] == ("picture", "Find x .")
    assert geometry[2] == ("In ", "picture", " and ", "picture", ", find x .")
    assert texts("scienceqa", tmp_path) == [
        ("picture", "Which one ?\nA. red\nB. green"),
        ("It is large.\nWhich one ?\nA. an ox\nB. a cat\nC. a bee",),
    ]
    assert texts("mathvista", tmp_path)[1] == ("picture", "How far ? (Unit: m)")
    assert "the red one" in texts("refcoco", tmp_path)[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), [("geometry3k", "qwen2_5_vl"), ("refcoco", "qwen3_vl")])
def test_a_recipe_runs_end_to_end(name: str, family: str, tmp_path: Path) -> None:
    if name == "geometry3k":
        pytest.importorskip("math_verify")
    sample, model = written(name, tmp_path), tiny_checkpoints.save(family, tmp_path / "model")
    # one of six truths of geometry3k cannot be read
    asked = f"generation.prompts_per_iteration={min(4, len(sample.rows))}"
    config = recipe(name, tmp_path, f"vlm.path={model}", "rewards.0.max_failed=0.5", asked)
    found = rows(train(config))
    unscored = sum(pair is None for pair in sample.answers)
    assert len(found) == 2 and found[-1][f"eval/{config.reward_labels[0]}_failed"] == unscored


def test_a_format_that_does_not_fit_names_the_row_and_the_columns(tmp_path: Path) -> None:
    written("clevr", tmp_path)
    config = recipe("chartqa", tmp_path, "vlm.path=assets/tiny-vlm")
    says = r"train:1: task\.format chartqa cannot read.*'query'; its columns: image, prob"
    with pytest.raises(ValueError, match=says):
        Questions(config, "train")[0]


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    written("clevr", tmp_path)
    own = tmp_path / "mine.py"
    made = "{'prompt': row['problem'].upper(), 'image': row['image'], 'answer': '1'}"
    own.write_text(f"def row(row):\n    return {made}\n")
    found = Questions(recipe("clevr", tmp_path, "vlm.path=assets/tiny-vlm", f"task.format={own}:row"), "train")[0]
    assert found.prompt.parts[1] == "HOW MANY ITEMS ARE THERE?" and found.columns == {"answer": "1"}
