"""Grids show every picture, unsmoothed if tiny, with its texts beside it and nothing cut."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from genrl.runtime.show import pictures

COLOURS = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0), (0, 250, 250)]


def plain(count: int = 5, size: tuple[int, int] = (64, 64)) -> list[Image.Image]:
    return [Image.new("RGB", size, colour) for colour in COLOURS[:count]]


def area(sheet: Image.Image, colour: tuple[int, int, int]) -> int:
    return int((np.asarray(sheet) == colour).all(-1).sum())


def test_every_tile_is_there_can_be_read_and_is_enlarged_by_whole_pixels() -> None:
    sheet = pictures.grid(plain(), ["a prompt"] * 5, ["shapes 0.50"] * 5)
    assert [area(sheet, colour) for colour in COLOURS] == [192 * 192] * 5
    checker = Image.fromarray(np.indices((64, 64)).sum(0).astype(np.uint8) % 2 * 255).convert("RGB")
    tile = np.asarray(pictures.grid([checker]))[10 : 10 + 192, 10 : 10 + 192, 0]
    assert set(np.unique(tile)) == {0, 255}  # no grey: nothing was smoothed
    assert (tile[::3, ::3] == np.asarray(checker)[..., 0]).all()
    sheet = pictures.side_by_side(plain(2), plain(2)[::-1], ["one", "two"], ["before"] * 2, ["after"] * 2)
    assert area(sheet, COLOURS[0]) == area(sheet, COLOURS[1]) == 2 * 192 * 192
    for size in ((8, 8), (64, 64), (100, 300), (1024, 512), (16, 2000)):
        sheet = pictures.grid([Image.new("RGB", size)], ["p"], ["r"])
        assert 128 + 20 <= sheet.width <= 600 and 128 + 20 <= sheet.height <= 330


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        pictures.save_png(pictures.grid(plain(), ["prompt"] * 5, ["0.1"] * 5, title="Step 3"), tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_tensors_become_pictures_and_a_video_a_strip_from_its_first_to_its_last_frame() -> None:
    frames = torch.linspace(0, 1, 9).reshape(9, 1, 1, 1).expand(9, 3, 4, 4)
    strip = np.asarray(pictures.filmstrip(frames, 3))[0, :, 0]
    assert strip.tolist() == [0] * 4 + [255] * 2 + [128] * 4 + [255] * 2 + [255] * 4
    assert pictures.to_pil(frames[:1]).size == (4, 4)
    assert pictures.to_pil(frames[:2]).size == (10, 4)
    tensor = torch.tensor([-1.0, 0.5, 2.0, float("nan")]).reshape(1, 2, 2).expand(3, 2, 2)
    assert np.asarray(pictures.to_pil(tensor))[..., 0].tolist() == [[0, 128], [255, 0]]


def test_best_and_worst_of_each_group_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[object, ...]] = []
    monkeypatch.setattr(pictures, "side_by_side", lambda *arguments, **_: shown.append(arguments))
    images = plain()
    pictures.best_and_worst(images, [0.2, 0.9, None, 0.4, float("nan")], [7, 7, 7, 7, 8], ["p", "p", "p", "p", "q"])
    assert shown == [([images[1]], [images[0]], ["p"], ["best 0.90"], ["worst 0.20"])]
    assert pictures.best_and_worst(images, [None, 1.0, None, 1.0, 2.0], [0, 0, 0, 1, 2], ["p"] * 5) is None
    labels = pictures.reward_labels({"shapes": [0.834, None], "size": [1234.0, float("nan")], "tiny": [0.001, 0.0]}, 2)
    assert [label.replace("\u00a0", " ") for label in labels] == [
        "shapes 0.83, size 1.2e+03, tiny 0.001",
        "shapes no score, size no score, tiny 0.00",
    ]


def test_samples_are_stored_and_read_back(tmp_path: Path) -> None:
    noise = torch.rand(3, 64, 64)
    large = torch.rand(3, 1024, 2048)
    grid_picture = pictures.save_samples(tmp_path, 20, [noise, large], ["a", "b"], {"r": [float("nan"), 0.5]})
    pictures.save_samples(tmp_path, 0, [noise, noise], ["a", "c"], {"r": [0.1, 0.2]})
    (tmp_path / "step-000040").mkdir()  # interrupted before samples.json
    first, last = pictures.first_and_last(tmp_path)
    assert (first.step, last.step, last.prompts, last.rewards) == (0, 20, ["a", "b"], {"r": [None, 0.5]})
    with Image.open(last.files[0]) as stored, Image.open(last.files[1]) as shrunk:
        assert np.array_equal(np.asarray(stored), np.asarray(pictures.to_pil(noise))) and shrunk.size == (1024, 512)
    with Image.open(tmp_path / "step-000020.png") as image:
        assert image.size == grid_picture.size
    json.loads((tmp_path / "step-000020" / "samples.json").read_text(), parse_constant=pytest.fail)


def test_before_and_after_shows_the_shared_prompts(tmp_path: Path) -> None:
    assert pictures.before_after(tmp_path) is None
    red, green, blue, *_ = plain()
    pictures.save_samples(tmp_path, 0, [red, blue], ["a", "changed"], {})
    assert pictures.before_after(tmp_path) is None
    pictures.save_samples(tmp_path, 10, [blue, blue], ["a", "b"], {})
    pictures.save_samples(tmp_path, 20, [green, blue], ["a", "b"], {"r": [0.5, 0.5]})
    sheet = pictures.before_after(tmp_path)
    assert sheet is not None
    assert [area(sheet, colour) for colour in COLOURS[:3]] == [192 * 192, 192 * 192, 0]
    for step in (0, 10):
        pictures.save_samples(tmp_path / "many", step, [red, green, red, blue, red], list("abcde"), {})
    sheet = pictures.before_after(tmp_path / "many", limit=3)
    assert sheet is not None
    assert [area(sheet, colour) for colour in COLOURS[:3]] == [2 * 192 * 192, 2 * 192 * 192, 2 * 192 * 192]
