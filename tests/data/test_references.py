"""Reference pictures: the three layouts, and sources that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from PIL import Image

from genrl.data.prompts import Prompt, PromptError
from genrl.data.references import read

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
    found = read(layouts(tmp_path)[layout])
    assert [found.count(prompt) for prompt in ("a red star", "two dogs", "a cat")] == [2, 1, 0]
    levels = {found.picture("a red star", k).getpixel((0, 0))[0] for k in range(2)}
    assert levels == {10, 30} and found.picture("two dogs", 0).size == (8, 6)
    found.require([Prompt("two dogs", {}, 1)], "train.txt")
    nearest = r"'two dogz' \(the nearest that has one: 'two dogs'\) of train.txt:2 and 1 other prompt"
    with pytest.raises(PromptError, match=nearest):
        found.require([Prompt("two dogs", {}, 1), Prompt("two dogz", {}, 2), Prompt("a cat", {}, 3)], "train.txt")


def test_sources_that_cannot_be_used(tmp_path: Path) -> None:
    def refused(source: str, words: str) -> None:
        with pytest.raises(PromptError, match=words):
            found = read(str(tmp_path / source))
            found.picture("a cat", 0)
            found.check(["a cat"])

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
    read(source).check(["a red star", "two dogs"])
    file = tmp_path / "pictures" / "2.png"
    file.write_bytes(file.read_bytes()[:-20])  # cut off within its pixels
    if layout == 2:
        table = [{"prompt": prompt, "image": {"bytes": b"", "path": None}} for prompt, _ in ROWS[:2]]
        table.append({"prompt": "a red star", "image": {"bytes": file.read_bytes(), "path": None}})
        table[0]["image"] = table[1]["image"] = {"bytes": (tmp_path / "pictures" / "0.png").read_bytes(), "path": None}
        datasets.Dataset.from_list(table).to_parquet(tmp_path / "set" / "train.parquet")
    found = read(source)
    found.check(["two dogs"])
    where = "row 3" if layout == 2 else r".*2\.png"
    with pytest.raises(PromptError, match=f"reference 2 of the prompt 'a red star', {where}: "):
        found.check(["two dogs", "a red star"])
