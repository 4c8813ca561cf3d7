"""The recipes for published data sets: they read rows of the right columns, and judge hard answers."""

import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from genrl.config import load
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import open_rewards
from genrl_rewards.scorers.texts.completions import score_completions
from tests.vlm.rollout.recipe_rows import SAMPLES, written

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "vlm" / "data"


def recipe(name: str, folder: Path, *more: str) -> VLMConfig:
    data = [f"task.train={folder}:train", f"task.eval={folder}:test"]
    result = load(FOLDER / f"{name}.yaml", [*data, *more])
    assert isinstance(result, VLMConfig)
    return result


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
    result = [questions[k] for k in range(len(questions))]
    assert len(result) == len(sample.answers)
    for place, right in ((0, True), (1, False)):
        said = [f"<answer>{pair[place] if pair else 3}</answer>" for pair in sample.answers]
        columns = {key: [row.columns[key] for row in result] for key in result[0].columns}
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
    result = Questions(recipe("clevr", tmp_path, "vlm.path=assets/tiny-vlm", f"task.format={own}:row"), "train")[0]
    assert result.prompt.parts[1] == "HOW MANY ITEMS ARE THERE?" and result.columns == {"answer": "1"}
