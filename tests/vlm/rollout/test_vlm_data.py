"""Questions from a generator, from a file with pictures beside it, and from a data set; what is wrong with a row."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from genrl.playground.shapes import Scene
from genrl.playground.tasks import shapes
from genrl.vlm import tasks
from genrl.vlm.policies.pictures import black, degraded, masked, with_pictures
from genrl.vlm.policies.processor import open_image
from genrl.vlm.rollout import data as reading
from genrl.vlm.rollout.data import Questions
from genrl.vlm.tasks import Row
from genrl.vlm.train import train
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
        sizes = {split: sum(len(shapes.arrangements(split, k)) for k in range(1, 7)) for split in ("train", "eval")}
        assert sizes["eval"] / sum(sizes.values()) == pytest.approx(0.25, abs=0.02)


def written(folder: Path, number: int, name: str) -> str:
    """A .jsonl file of generated questions, pictures beside it."""
    lines = []
    for k in range(number):
        row = tasks.row("count", "train", k)
        Image.fromarray(pixels(row)).save(folder / f"{name}-{k}.png")
        lines.append(
            json.dumps(
                {"question": row.columns["question"], "picture": f"{name}-{k}.png", "answer": row.columns["answer"]}
            )
        )
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder / f"{name}.jsonl")


def test_a_data_set_with_pictures(tmp_path: Path) -> None:
    made = [tasks.row("count", "train", k) for k in range(3)]
    columns = {
        "prompt": [str(row.columns["question"]) for row in made],
        "image": [Image.fromarray(pixels(row)) for row in made],
        "answer": [str(row.columns["answer"]) for row in made],
    }
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "train.parquet")
    config = vlm_runs.config(tmp_path, task={"name": None, "train": f"{tmp_path}:train"})
    found = Questions(config, "train")[1]
    assert np.array_equal(pixels(found), pixels(made[1])) and found.columns == {"answer": made[1].columns["answer"]}
    wrong = vlm_runs.config(tmp_path, task={"name": None, "train": f"{tmp_path}:train", "image": "photo"})
    with pytest.raises(ValueError, match="no column 'photo'; it has prompt, image, answer"):
        Questions(wrong, "train")


def test_an_unreadable_picture_is_named_with_its_row(tmp_path: Path) -> None:
    source = written(tmp_path, 4, "a")
    (tmp_path / "a-0.png").write_bytes(b"no picture")
    task = {"name": None, "train": source, "prompt": "question", "image": "picture"}
    with pytest.raises(ValueError, match=r"a\.jsonl:1: picture .*a-0\.png. cannot be read"):
        train(vlm_runs.config(tmp_path, task=task))


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


def test_a_run_on_files_counts_their_places_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for training, and once for evaluation, however often its questions are opened; and once in the pass that
    reads all expected answers at the start."""
    task = {"name": None, "prompt": "question", "image": "picture"}
    task |= {split: written(tmp_path, 4, split) for split in ("train", "eval")}
    counted: list[tuple[str, int]] = []
    own = reading.Questions._row

    def row_of(self: reading.Questions, number: int, opened: dict[str, reading.Opener]) -> Row:
        if opened["image"] is reading._unopened:
            counted.append((self.split, number))
        return own(self, number, opened)

    monkeypatch.setattr(reading.Questions, "_row", row_of)
    changes = {"task": task, "evaluation": {"every": 1, "questions": 4, "blind": False}}
    train(vlm_runs.config(tmp_path, iterations=2, **changes))
    assert sorted(counted) == sorted((split, k) for split in ("train", "train", "eval") for k in range(4))
