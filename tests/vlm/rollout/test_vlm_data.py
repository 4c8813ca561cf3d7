"""Questions from a generator, from a file with pictures beside it, and from a data set; what is wrong with a row."""

import io
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from genrl.playground.shapes import Scene
from genrl.playground.tasks import shapes
from genrl.vlm import tasks
from genrl.vlm.policies.pictures import black, degraded, masked, with_pictures
from genrl.vlm.policies.processor import Prompt, open_image
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import totals
from genrl.vlm.rollout.turns import prompt_of
from genrl.vlm.tasks import Row
from genrl.vlm.train import train
from genrl_rewards import RewardFailed
from genrl_rewards.given import lending
from tests.vlm import vlm_runs


def pixels(row: Row) -> np.ndarray:
    (picture,) = [part for part in row.prompt.parts if isinstance(part, Image.Image)]
    return np.array(picture)


class TestShapes:
    def test_the_answer_is_what_is_drawn(self) -> None:
        for number in range(40):
            rng = np.random.default_rng(number)
            scene, _, answer = shapes.QUESTIONS["count"](rng, "train")
            assert int(answer) == len(scene.things)
            scene, _, answer = shapes.QUESTIONS["colour"](rng, "train")
            colours = [thing.colour for thing in scene.things]
            assert all(colours.count(answer) > colours.count(c) for c in set(colours) - {answer})

    def test_held_out_arrangements_are_never_trained_on(self) -> None:
        def cells(scene: Scene) -> tuple[int, ...]:
            step = 64 / shapes.CELLS
            return tuple(sorted(int(t.y / step) * shapes.CELLS + int(t.x / step) for t in scene.things))

        for split in ("train", "eval"):
            for number in range(60):
                scene, _, _ = shapes.QUESTIONS["shapes"](np.random.default_rng(number), split)
                assert shapes.held_out(cells(scene)) == (split == "eval")


def test_a_data_set_with_pictures(tmp_path: Path) -> None:
    made = [tasks.row("count", "train", k) for k in range(3)]
    columns = {
        "prompt": [str(row.columns["question"]) for row in made],
        "image": [Image.fromarray(pixels(row)) for row in made],
        "answer": [str(row.columns["answer"]) for row in made],
    }
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "train.parquet")
    config = vlm_runs.config(tmp_path, task={"name": None, "train": f"{tmp_path}:train"})
    result = Questions(config, "train")[1]
    assert np.array_equal(pixels(result), pixels(made[1])) and result.columns == {"answer": made[1].columns["answer"]}
    wrong = vlm_runs.config(tmp_path, task={"name": None, "train": f"{tmp_path}:train", "image": "photo"})
    with pytest.raises(ValueError, match="no column 'photo'; it has prompt, image, answer"):
        Questions(wrong, "train")


def test_a_prompt_longer_than_the_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than the 64 positions of the model"):
        train(vlm_runs.config(tmp_path, generation={"max_new_tokens": 60}))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_spoilt_pictures_keep_their_size() -> None:
    prompt, rng = tasks.row("count", "train", 0).prompt, np.random.default_rng(0)
    before = np.array(prompt.parts[0])
    for change in (masked(0.5, 16), degraded, black):
        spoilt = with_pictures(prompt, change, rng).parts[0]
        assert isinstance(spoilt, Image.Image)
        after = np.array(open_image(spoilt, "here"))
        assert after.shape == before.shape and not np.array_equal(after, before)
    gone = np.array(masked(0.5, 16)(Image.new("RGB", (160, 160), "white"), rng)).reshape(10, 16, 10, 16, 3)
    patches = gone.max(axis=(1, 3, 4))
    assert set(np.unique(patches)) == {0, 255} and 0.3 < (patches == 0).mean() < 0.7


# -- Rows of questions as people have them, and what becomes of one that cannot be prepared
def encoded(picture: Image.Image, container: str = "PNG", **more: Any) -> bytes:
    held = io.BytesIO()
    picture.save(held, container, **more)
    return held.getvalue()


def first_pixel(prompt: Prompt) -> tuple[int, ...]:
    (picture,) = [part for part in prompt.parts if not isinstance(part, str)]
    return tuple(np.array(open_image(picture, "here"))[0, 0].tolist())


def test_pictures_in_any_form(tmp_path: Path) -> None:
    red = Image.new("RGB", (32, 32), "red")
    red.save(tmp_path / "a.png")
    raw, clear = encoded(red), Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    forms: list[Any] = [raw, {"bytes": raw, "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}, red]
    forms += [np.array(red), str(tmp_path / "a.png"), {"bytes": raw, "path": "elsewhere.png"}]
    wrong: list[Any] = [3, np.zeros((8, 8, 3)), {"url": "a.png"}, "https://example.org/a.png", b"no picture"]
    rows = [{"prompt": "what?", "image": form, "answer": "1"} for form in [*forms, clear, *wrong]]
    with lending({"python:rows": rows}):
        questions = Questions(vlm_runs.config(tmp_path, task={"name": None, "train": "python:rows"}), "train")
        assert [first_pixel(questions[k].prompt) for k in range(len(forms))] == [(255, 0, 0)] * len(forms)
        assert first_pixel(questions[len(forms)].prompt) == (255, 255, 255)
        for k in range(len(forms) + 1, len(rows)):
            with pytest.raises(ValueError, match=f"python:rows:{k + 1}: picture .*cannot be read"):
                questions[k]
            broken = questions.row(k)
            assert f"python:rows:{k + 1}: picture" in broken.prompt.broken and broken.columns["answer"] == "1"


def test_no_question_is_asked_without_the_picture_that_its_row_has(tmp_path: Path) -> None:
    for file in ("a.png", "a.jpg", "a.mp4"):
        (tmp_path / file).touch()
    task: dict[str, Any] = {"name": None, "train": str(tmp_path / "a.jsonl")}

    def asked(row: dict[str, Any], **changes: Any) -> Questions:
        (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "what?", "answer": "1", **row}))
        return Questions(vlm_runs.config(tmp_path, task=task | changes), "train")

    rows: list[dict[str, Any]] = [{"images": ["a.png"]}, {"img": "a.png"}, {"Image_path": "a.jpg"}, {"video": "a.mp4"}]
    for row in rows:
        ((name, key),) = ((name, "video" if name == "video" else "image") for name in row)
        with pytest.raises(
            ValueError, match=rf"a.jsonl:1: there is no column 'image', and '{name}' .*task.{key}: {name}"
        ):
            asked(row)
        for allowed in (asked(row, image=None), asked({"image": None, **row})):
            assert allowed[0].prompt.parts == ("what?",)
    for row in ({"photos": 3, "videos": "many"}, {"reference_image": "a.png"}):
        assert asked(row)[0].prompt.parts == ("what?",)


def test_pictures_are_looked_up_in_the_folder_of_a_data_set_before_beside_it(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows = {"prompt": ["what?"] * 3, "image": ["a.png", "b.png", "c.png"], "answer": ["1"] * 3}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "set" / "train.parquet")
    Image.new("RGB", (32, 32), "red").save(tmp_path / "set" / "a.png")
    for name in "ab":
        Image.new("RGB", (32, 32), "blue").save(tmp_path / f"{name}.png")
    questions = Questions(vlm_runs.config(tmp_path, task={"name": None, "train": f"{tmp_path}/set:train"}), "train")
    assert [first_pixel(questions[k].prompt) for k in (0, 1)] == [(255, 0, 0), (0, 0, 255)]
    with pytest.raises(ValueError, match=r"here: picture '.*/set/c.png' cannot be read: there is no such file"):
        first_pixel(questions[2].prompt)
    questions.source = "org/name:train"
    with pytest.raises(ValueError, match="relative path, and the data set is no folder here"):
        questions[0]


def test_absolute_pictures_of_a_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    file, name = tmp_path / "data" / "a.jsonl", str(tmp_path / "a.png")
    for column, value in (("image", name), ("images", [name]), ("photo", name)):
        file.write_text(json.dumps({"prompt": "what?", column: value}))
        task = {"name": None, "train": str(file), "image": column}
        assert first_pixel(Questions(vlm_runs.config(tmp_path, task=task), "train")[0].prompt) == (255, 0, 0)


@pytest.mark.parametrize(
    "rows, system, said",
    [
        ([("human", "<image>what?"), ("gpt", "one")], None, "one"),
        ([("system", "Be brief."), ("human", "what?")], "Be brief.", None),
        ([("system", ""), ("user", "what?"), ("assistant", "one")], "", "one"),
        ([("human", "a"), ("gpt", "b"), ("human", "<image>c"), ("model", "d")], None, "d"),
    ],
)
def test_conversations(rows: list[tuple[str, str]], system: str | None, said: str | None) -> None:
    pictures = ["a.png"] * any("<image>" in text for _, text in rows)
    for keys in (("from", "value"), ("role", "content")):
        if keys[0] == "role" and "human" in dict(rows):
            continue
        asked = [dict(zip(keys, row, strict=True)) for row in rows]
        prompt, answer = prompt_of(asked, {"image": pictures}, {"image": lambda one: (one,)}, None, "here")
        assert prompt.system == system and answer == said and prompt.parts[-1] in ("what?", "c")
    with pytest.raises(ValueError, match="here: a message is .*from, value"):
        prompt_of([{"from": "function_call", "value": "x"}], {}, {}, None, "here")
    with pytest.raises(ValueError, match="here: the question or a message is empty"):
        prompt_of([{"from": "human", "value": ""}], {}, {}, None, "here")


FORMAT = """
def plain(row):
    if row["k"] == 5:
        raise KeyError("no such thing")
    return {"prompt": row["prompt"], "image": row["image"], "answer": row["answer"]}
"""


@pytest.mark.parametrize("together", [None, 4])
def test_whatever_a_row_raises_is_its_own_failure(tmp_path, together: int | None, caplog) -> None:
    """A text without end, a thread of a picture, no picture, a place without one, a user's format that raises."""
    (tmp_path / "mine.py").write_text(FORMAT)
    good = encoded(Image.new("RGB", (32, 32), "red"))
    rows = [{"prompt": "what?", "image": good, "answer": "1", "k": k} for k in range(8)]
    rows[1]["prompt"] = "what " * 5000
    rows[2]["image"] = encoded(Image.new("RGB", (500, 1), "red"))
    rows[3]["image"] = b"cut"
    rows[4]["prompt"] = "<image><image>what?"
    made = {"prompts_per_iteration": 8, "group_size": 4, "max_new_tokens": 8, "batch_size": together}
    task = {"name": None, "train": "python:rows", "format": f"{tmp_path}/mine.py:plain"}

    def config(limit: float) -> Any:
        rewards = [{"name": "exact", "max_failed": limit}]
        return vlm_runs.config(tmp_path, task=task, rewards=rewards, generation=made, evaluation={"every": 0})

    with lending({"python:rows": rows}):
        with vlm_runs.opened(config(0.7)) as run:
            answers, row = run.draw()
            bad = [int(one.name.rsplit(":", 1)[1]) in (2, 3, 4, 5, 6) for one in answers.rows for _ in range(4)]
            assert sum(bad) == 20 and totals(run.config, answers.scores).isnan().tolist() == bad
            assert row["reward/exact_failed"] == 20.0
        wrong = {2: "positions of the model", 3: "200 times", 4: "identify", 5: "places", 6: "KeyError"}
        for k, says in wrong.items():
            assert any(f"python:rows:{k}:" in line and says in line for line in caplog.text.splitlines()), says
        with vlm_runs.opened(config(0.5)) as run, pytest.raises(RewardFailed, match=r"20 of 32 samples"):
            run.draw()
