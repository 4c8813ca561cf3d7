"""`genrl rewards`, `score` and `serve` as a user meets them; what cannot be read is named and counted."""

import csv
import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from genrl.cli.app import app
from tests.cli.commands import words, wrong_uses
from tests.ports import free_port
from tests.servers import spawn

MINE = """
def brightness(images):
    return images.mean((1, 2, 3)), {"red": images[:, 0].mean((1, 2))}

def words(images, prompts):
    return [None if p == "none" else float(len(p.split())) for p in prompts]

def column(images, style):
    return [float(len(s)) for s in style]

def best(images, group):
    means = images.mean((1, 2, 3)).tolist()
    return [float(m == max(means)) for m in means]

def like(images, reference_images):
    return [float(np_mean(r)) for r in reference_images]

def np_mean(picture):
    return sum(picture.convert("L").tobytes()) / 255 / picture.width / picture.height

def broken(images):
    raise KeyError("oops")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: rewards in mine.py, and pictures of three levels in `shots`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("GENRL_REWARD_TOKEN", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "shots").mkdir()
    for name, level, size in (("a.png", 0, (4, 3)), ("b.png", 51, (4, 3)), ("c.png", 255, (5, 5))):
        Image.new("RGB", size, (level, level, level)).save(tmp_path / "shots" / name)
    (tmp_path / "shots" / "notes.txt").write_text("not a picture")
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_rewards_are_listed_on_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run("rewards").output
    assert all(name in text for name in ("shapes", "ocr", "clipscore", "pickscore", "tag_format"))
    assert len(text.splitlines()) <= 24


def test_rewards_are_searched_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is that one; words are looked for in all that is said; many are a line each."""
    monkeypatch.setenv("COLUMNS", "120")
    one = run("rewards", "ocr").output
    assert one.startswith("ocr (") and "takes images, prompts" in one and "pickscore" not in one
    assert "hpsv2" in (several := run("rewards", "Human", "PREFERENCE").output) and "jpeg" not in several
    many = run("rewards", "images").output.splitlines()
    assert len(many) > 20 and all(re.match(r"\w+: ", line) for line in many)
    wrong = run("rewards", "pickscre")
    assert wrong.exit_code == 2 and "Did you mean 'pickscore'?" in wrong.output


def test_a_folder_becomes_one_row_per_picture_but_for_the_grid_of_sample(folder: Path) -> None:
    """Whatever the size of a batch; in a table, with the parts as columns."""
    result = run("score", "mine.py:brightness", "shots")
    actual = rows(result)
    assert [row["image"] for row in actual] == [f"shots/{name}.png" for name in "abc"]
    assert [row["score"] for row in actual] == pytest.approx([0.0, 0.2, 1.0])
    assert [row["parts"]["red"] for row in actual] == pytest.approx([0.0, 0.2, 1.0])
    assert "3 scored, 0 without a score, 0 skipped; mean 0.4000" in result.stderr
    assert run("score", "mine.py:brightness", "shots", "--batch-size", "1").stdout == result.stdout
    assert run("score", "mine.py:brightness", "shots/a.png", "shots/b.png", "--out", "s.csv").exit_code == 0
    table = list(csv.reader((folder / "s.csv").open()))
    assert table[0] == ["image", "prompt", "score", "red"]
    assert table[1] == ["shots/a.png", "", "0.0", "0.0"] and float(table[2][2]) == pytest.approx(0.2)
    # Where its prompts.json is beside it; a picture of that name is scored otherwise.
    shots = folder / "shots"
    (shots / "a.png").rename(shots / "00000.png")
    Image.new("RGB", (9, 9)).save(shots / "grid.png")

    def scored() -> list[str]:
        return [Path(row["image"]).stem for row in rows(run("score", "mine.py:brightness", "shots"))]

    assert scored() == ["00000", "b", "c", "grid"]
    (shots / "prompts.json").write_text('[{"file": "00000.png", "prompt": "a", "seed": 0}]')
    assert scored() == ["00000", "b", "c"]


def test_rows_of_a_jsonl_bring_prompts_columns_and_pictures(folder: Path) -> None:
    lines = [
        {"image": "shots/a.png", "prompt": "one two", "style": "oil", "reference_image": "shots/c.png"},
        {"image": "shots/b.png", "prompt": "none", "style": "", "reference_image": "shots/b.png"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = rows(run("score", "mine.py:words", "rows.jsonl"))
    assert [row["score"] for row in result] == [2.0, None] and result[0]["style"] == "oil"
    assert [row["score"] for row in rows(run("score", "mine.py:column", "rows.jsonl"))] == [3.0, 0.0]
    assert [row["score"] for row in rows(run("score", "mine.py:like", "rows.jsonl"))] == pytest.approx([1.0, 0.2])
    assert [r["score"] for r in rows(run("score", "mine.py:words", "shots", "--prompt", "a b c"))] == [3.0] * 3
    lines = [{"image": f"shots/{name}.png", "group": group} for name, group in (("a", 1), ("c", 2), ("b", 1))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = rows(run("score", "mine.py:best", "rows.jsonl", "--batch-size", "1"))
    assert [row["score"] for row in result] == [0.0, 1.0, 1.0]
    assert "different sizes" in run("score", "mine.py:best", "shots", "--prompt", "x").stderr


def test_what_cannot_be_read_is_named_skipped_and_counted(folder: Path) -> None:
    (folder / "shots" / "b.png").write_bytes(b"\x89PNG broken")
    truncated = (folder / "shots" / "c.png").read_bytes()[:45]
    (folder / "shots" / "d.png").write_bytes(truncated)
    result = run("score", "mine.py:brightness", "shots")
    assert [row["image"] for row in rows(result)] == ["shots/a.png", "shots/c.png"]
    assert "skipped: picture 'shots/b.png' cannot be read" in result.stderr
    assert "skipped: picture 'shots/d.png' cannot be read" in result.stderr
    assert "2 scored, 0 without a score, 2 skipped" in result.stderr
    lines = ['{"image": "shots/a.png"}', "{", "[]", '{"image": "../a.png", "image": "shots/a.png"}']
    lines += ['{"image": "../a.png"}', '{"image": "gone.png"}', "\xff"]
    (folder / "rows.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    result = run("score", "mine.py:brightness", "rows.jsonl")
    assert len(rows(result)) == 1 and "6 skipped" in result.stderr
    said = ("rows.jsonl:2: ", "rows.jsonl:3: a row is an object", "rows.jsonl:4: the column 'image' is written twice")
    said += ("rows.jsonl:5: '../a.png' is outside", "gone.png")
    assert all(words in result.stderr for words in said)
    (folder / "only").mkdir()
    (folder / "only" / "b.png").write_bytes(b"broken")
    result = run("score", "mine.py:brightness", "only")
    assert result.exit_code == 1 and "0 scored, 0 without a score, 1 skipped" in result.stderr


@wrong_uses("score")
def test_wrong_input_is_answered_in_words(folder: Path, line: str, says: str) -> None:
    (folder / "empty").mkdir()
    (folder / "none.jsonl").write_text("")
    result = run(*line.split())
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert says in words(result.stderr), result.stderr


def test_a_reward_that_raises_serving_without_a_token_and_a_missing_extra(folder: Path, monkeypatch: Any) -> None:
    from genrl_rewards import loading
    from genrl_rewards.service import serve

    result = run("score", "mine.py:broken", "shots")
    assert result.exit_code == 1 and "raised for 3 of 3" in result.stderr and "in broken" in result.stderr
    result = run("serve", "mine.py:brightness", "--host", "0.0.0.0")
    assert result.exit_code == 2 and "set a token" in result.stderr
    assert "Did you mean 'pickscore'" in run("serve", "pickscor").stderr
    monkeypatch.setitem(loading.BUILT_IN, "ocr", loading.BUILT_IN["ocr"]._replace(packages=("not_here",)))
    assert "pip install 'rapidocr" in run("score", "ocr", "shots", "--prompt", "x").stderr
    monkeypatch.setattr(serve, "PACKAGES", ("fastapi", "not_here"))
    said = run("serve", "mine.py:brightness").stderr
    assert "serving needs not_here, which is not installed here: pip install 'fastapi" in said


@pytest.mark.slow
def test_scores_of_a_served_reward_are_the_local_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, name = free_port(), f"{folder / 'mine.py'}:brightness"
    server = spawn(name, port, "abc")
    try:
        local = run("score", name, "shots")
        arguments = ("score", name, "shots", "--remote", f"http://127.0.0.1:{port}")
        assert "401" in run(*arguments).stderr
        monkeypatch.setenv("GENRL_REWARD_TOKEN", "abc")
        assert run(*arguments).stdout == local.stdout and math.isfinite(rows(local)[0]["score"])
        assert run("score", name, "shots", "--isolate").stdout == local.stdout
    finally:
        server.terminate()
        assert server.wait(20) in (0, -signal.SIGTERM)
