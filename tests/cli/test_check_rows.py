"""`genrl check --rows`: every row and picture of the data is looked at, without a model."""

import json
from pathlib import Path

import pytest
from PIL import Image

from genrl.cli.check import report
from genrl.config import load
from genrl_rewards import pictures
from tests.cli.commands import run
from tests.vlm import vlm_runs


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_remarked", {})


def written(folder: Path, column: str) -> None:
    """Eight rows, of which three have a picture that cannot be shown."""
    Image.effect_noise((32, 32), 90).save(folder / "good.png")
    Image.new("RGB", (32, 32)).save(folder / "plain.png")
    Image.new("RGB", (201, 1)).save(folder / "thin.png")
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:200])
    Image.new("I;16", (8, 8)).save(folder / "deep.png")
    names = ["good", "plain", "thin", "good", "cut", "good", "deep", "good"]
    lines = [json.dumps({"prompt": f"p{k}", column: f"{name}.png", "answer": "1"}) for k, name in enumerate(names)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.jsonl").write_text('{"prompt": "held out"}')


def lines_of(said: str, *wanted: tuple[int, str]) -> None:
    """Each of these rows is named with what is wrong."""
    for line, why in wanted:
        assert any(f"a.jsonl:{line}: " in one and why in one for one in said), (line, why, said)


BAD = ((3, "200 times"), (5, "truncated"), (7, "more than 8 bits"))


def test_every_picture_of_the_prompts_is_opened(folder: Path) -> None:
    written(folder, "source_image")
    changes = ["prompts.train=a.jsonl", "prompts.eval=b.jsonl"]
    said = run("check", "small.yaml", *changes, "--rows", code=1)
    assert "a.jsonl: 8 prompts" in said and "b.jsonl: 1 prompts" in said
    assert "rows: 9 read, 3 would fail" in said and "1 plain" in said
    lines, failing = report(load(folder / "small.yaml", changes))
    lines_of(lines, *BAD)
    assert failing == 3
    _, failing = report(load(folder / "small.yaml", [*changes, "sampling.inputs={image: source_image}"]))
    assert failing == 4  # a held-out prompt has none


def test_lists_and_videos_are_no_picture_of_a_row(folder: Path) -> None:
    """Pipelines would take them as pictures of several samples, or raise in the middle of the run."""
    picture = str(folder / "good.png")
    written(folder, "source_image")
    rows = [{"prompt": f"p{k}", "seen": seen} for k, seen in enumerate([picture, [picture] * 2, "a.mp4", [], 3, None])]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = ["prompts.train=a.jsonl", "prompts.eval=null", "evaluation.every=0", "sampling.inputs={image: seen}"]
    lines, failing = report(load(folder / "small.yaml", changes))
    not_pictures = ((2, "seen: is a list"), (3, "is a video"), (4, "is a list"), (5, "is a number"), (6, "no picture"))
    lines_of(lines, *not_pictures)
    assert failing == len(not_pictures)


def test_every_question_is_put_together(tmp_path: Path) -> None:
    written(tmp_path, "image")
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write('\n{"prompt": "<image><image>which?", "image": "good.png", "answer": "1"}')
    task = {"name": None, "train": str(tmp_path / "a.jsonl")}
    lines, failing = report(vlm_runs.config(tmp_path, task=task))
    lines_of(lines, *BAD, (9, "places"))
    assert failing == 4 and lines[-1] == "rows: 9 read, 4 would fail"
