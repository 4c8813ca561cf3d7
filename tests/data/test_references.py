"""Reference pictures: the three layouts, and sources that cannot be used."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

import genrl_rewards
from genrl.data.preferences import read_references
from genrl.data.prompts import Prompt, PromptError
from genrl.data.sizes import short_bucket, sized
from genrl.diffusion.config.sections import Sampling
from genrl.playground.edits import Task, edits
from genrl.playground.shapes import draw, held_out
from genrl_rewards.scorers.objects.shapes import find

ROWS = [("a red star", 10), ("two dogs", 20), ("a red star", 30)]


def layouts(folder: Path) -> list[str]:
    """The same three pictures, told apart by how bright they are, as a folder, a file and a data set."""
    (folder / "pictures" / "inner").mkdir(parents=True)
    rows, table = [], []
    for number, (prompt, level) in enumerate(ROWS):
        file = folder / "pictures" / ("inner" if number == 1 else "") / f"{number}.png"
        Image.new("RGB", (8, 6), (level, level, level)).save(file)
        file.with_suffix(".txt").write_text(f"{prompt}\n")
        rows.append(json.dumps({"prompt": prompt, "image": str(file.relative_to(folder))}))
        table.append({"prompt": prompt, "image": str(file)})
    (folder / "rows.jsonl").write_text("\n".join(rows))
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    (folder / "set").mkdir()
    datasets.Dataset.from_list(table, features=features).to_parquet(folder / "set" / "train.parquet")
    return [str(folder / "pictures"), str(folder / "rows.jsonl"), f"{folder / 'set'}:train"]


@pytest.mark.parametrize("layout", [0, 1, 2], ids=["folder", "jsonl", "data set"])
def test_every_layout_gives_the_pictures_of_a_prompt(tmp_path: Path, layout: int) -> None:
    result = read_references(layouts(tmp_path)[layout])
    assert [result.count(prompt) for prompt in ("a red star", "two dogs", "a cat")] == [2, 1, 0]
    levels = {result.picture("a red star", k).getpixel((0, 0))[0] for k in range(2)}
    assert levels == {10, 30} and result.picture("two dogs", 0).size == (8, 6)
    result.require([Prompt("two dogs", {}, 1)], "train.txt")
    nearest = r"'two dogz' \(the nearest that has one: 'two dogs'\) of train.txt:2 and 1 other prompt"
    with pytest.raises(PromptError, match=nearest):
        result.require([Prompt("two dogs", {}, 1), Prompt("two dogz", {}, 2), Prompt("a cat", {}, 3)], "train.txt")


def test_sources_that_cannot_be_used(tmp_path: Path) -> None:
    def refused(source: str, words: str) -> None:
        with pytest.raises(PromptError, match=words):
            result = read_references(str(tmp_path / source))
            result.picture("a cat", 0)
            result.check(["a cat"])

    layouts(tmp_path)
    refused("picturs", "does not exist; references are .*did you mean .*pictures")
    refused("pictures/0.txt", "is a file; references are")
    (tmp_path / "pictures" / "0.txt").unlink()
    refused("pictures", "0.png: its prompt is missing; write it into 0.txt")
    (tmp_path / "bare.jsonl").write_text('{"prompt": "a cat", "picture": "x"}')
    refused("bare.jsonl", "bare.jsonl:1: no column 'image', found 'picture'")
    (tmp_path / "own").mkdir()
    refused("own", "holds no pictures")
    (tmp_path / "own" / "deep.txt").write_text("a cat")
    (tmp_path / "own" / "deep.png").write_bytes(b"no picture")
    refused("own", "reference 1 of the prompt 'a cat'.*deep.png")
    Image.new("I;16", (4, 4)).save(tmp_path / "own" / "deep.png")
    refused("own", r"deep.png.* its pixels have more than 8 bits")


@pytest.mark.parametrize("layout", [0, 1, 2], ids=["folder", "jsonl", "data set"])
def test_all_pictures_are_checked_before_training(tmp_path: Path, layout: int) -> None:
    """Of the prompts that are trained on; a PNG with all its bytes, though none is decoded."""
    (source,) = layouts(tmp_path)[layout : layout + 1]
    read_references(source).check(["a red star", "two dogs"])
    file = tmp_path / "pictures" / "2.png"
    file.write_bytes(file.read_bytes()[:-20])  # cut off within its pixels
    if layout == 2:
        table = [{"prompt": prompt, "image": {"bytes": b"", "path": None}} for prompt, _ in ROWS[:2]]
        table.append({"prompt": "a red star", "image": {"bytes": file.read_bytes(), "path": None}})
        table[0]["image"] = table[1]["image"] = {"bytes": (tmp_path / "pictures" / "0.png").read_bytes(), "path": None}
        datasets.Dataset.from_list(table).to_parquet(tmp_path / "set" / "train.parquet")
    result = read_references(source)
    result.check(["two dogs"])
    where = "row 3" if layout == 2 else r".*2\.png"
    with pytest.raises(PromptError, match=f"reference 2 of the prompt 'a red star', {where}: "):
        result.check(["two dogs", "a red star"])


# -- Edits of the small world: the shipped files are those that are drawn, and edited as is asked
@pytest.mark.parametrize("task", ["move", "scale"])
def test_the_shipped_files_are_the_drawn_ones(task: Task, root: Path) -> None:
    prompts: dict[str, set[str]] = {}
    for split in ("train", "eval"):
        rows = [json.loads(line) for line in (root / "assets/edits" / f"{task}_{split}.jsonl").read_text().splitlines()]
        sampled = edits(task, split)  # type: ignore[arg-type]
        assert [row["prompt"] for row in rows] == [edit.instruction for edit in sampled]
        prompts[split] = {row["prompt"] for row in rows}
        for row, edit in zip(rows, sampled, strict=True):
            assert held_out(edit.scene.groups[0]) == (split == "eval")
            picture = np.array(Image.open(root / "assets/edits" / row["source_image"]))
            assert row["object"] == edit.object and row.get("direction", edit.asked) == edit.asked
            assert np.array_equal(picture, draw(edit.scene))
            assert edit.object in {f"{result.colour} {result.shape}" for result in find(picture)}
    assert not prompts["train"] & prompts["eval"]


def test_the_shipped_pairs_are_the_edits_carried_out_as_asked(root: Path) -> None:
    folder = root / "assets/edits"
    texts = ((folder / f"move_{part}.jsonl").read_text() for part in ("pairs", "train"))
    rows, known = ([json.loads(line) for line in text.splitlines()] for text in texts)
    blank = {"target_image": None}
    assert len(rows) == 96 and [row | blank for row in rows] == [row | blank for row in known[:96]]
    before, after = (
        [Image.open(folder / row[f"{k}_image"]).convert("RGB") for row in rows] for k in ("source", "target")
    )
    images = torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255 for picture in after])
    columns = {"source_image": before} | {name: [row[name] for row in rows] for name in ("object", "direction")}
    for name, least in (("edit_move", 0.4), ("edit_keep", 0.93)):
        reward = genrl_rewards.load(name, {"detector": "shapes"})
        assert min(genrl_rewards.score(reward, images=images, prompts=[""] * 96, columns=columns).values) > least


# -- The size of each prompt's samples: from its row, or a bucket
WIDE, TALL = (16, 24), (24, 16)


def rows(*columns: dict[str, object]) -> list[Prompt]:
    return [Prompt(f"prompt {k}", result, k + 1) for k, result in enumerate(columns)]


def test_rows_say_their_own_size_and_what_they_leave_out_is_the_pipelines() -> None:
    columns = {"height": 16, "width": 24}, {"height": 8, "num_frames": 5, "x": 1}, {}
    result = sized(rows(*columns), "rows", None, "a.jsonl")
    assert [row.size for row in result] == [{"height": 16, "width": 24}, {"height": 8, "num_frames": 5}, {}]
    for wrong in (0, -8, 8.5, "16", True):
        with pytest.raises(PromptError, match="a.jsonl:1: height must be a whole number above 0"):
            sized(rows({"height": wrong}), "rows", None, "a.jsonl")
    with pytest.raises(PromptError, match="no row has a column height, width, num_frames"):
        sized(rows({"x": 1}), "rows", None, "a.jsonl")


def test_buckets_are_dealt_in_turn() -> None:
    result = sized(rows({}, {}, {}), [WIDE, (*TALL, 9)], None, "a.txt")
    first, second = {"height": 16, "width": 24}, {"height": 24, "width": 16, "num_frames": 9}
    assert [row.size for row in result] == [first, second, first]
    assert [row.size for row in sized(rows({}), (), None, "a.txt")] == [{}]


def test_a_picture_gets_the_bucket_of_its_shape(tmp_path: Path) -> None:
    sizes = {"wide": (300, 200), "tall": (201, 300), "square": (8, 8)}
    for name, size in sizes.items():
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    given = rows(*({"image": str(tmp_path / f"{name}.png")} for name in sizes))
    result = [tuple(row.size.values()) for row in sized(given, [WIDE, TALL, (20, 20)], "image", "a.jsonl")]
    assert result == [WIDE, TALL, (20, 20)]
    with pytest.raises(PromptError, match="a.jsonl:1: no picture in the column 'image'"):
        sized(rows({}), [WIDE], "image", "a.jsonl")


def test_a_size_with_fewer_rows_than_a_micro_batch_is_named() -> None:
    result = sized(rows(*[{}] * 5), [WIDE, TALL], None, "a.txt")
    assert short_bucket(result, 2) is None
    four = [[64, 64], [32, 64], [64, 32], [32, 32]]
    dealt = sized(rows({}, {}, {}), four, None, "three.txt")
    assert "32 x 32 has 0 of the 3 prompts" in str(short_bucket(dealt, 1, four))
    assert short_bucket(dealt, 1, four, "photo") is None  # pictures choose theirs
    assert "24 x 16 has 2 of the 5 prompts, and a micro-batch is of 3" in str(short_bucket(result, 3))
    assert [Sampling(batch_size=b, group_size=g).prompts_together for b, g in ((8, 4), (4, 4), (2, 4))] == [2, 1, 1]
