"""What the keys of a reward may not say together, told before anything is loaded."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from genrl.config import ConfigError, check_files, load
from genrl_rewards import lower_end

BASE = """\
model: {{path: org/name}}
prompts: {{train: train.txt}}
trainer: {{algorithm: diffusion_nft}}
evaluation: {{every: 0}}
output: {folder}/run
rewards:
"""
REMOTE = "remote: 'http://127.0.0.1:1'"


def write(folder: Path, rewards: str) -> Path:
    (folder / "train.txt").write_text("a\nb\n")
    (folder / "c.yaml").write_text(BASE.format(folder=folder) + rewards + "\n")
    return folder / "c.yaml"


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ("  - {name: ocr, schedule: [[10, 0], [5, 1]]}", "rewards.0.schedule: the iterations must rise, found 10, 5"),
        ("  - {name: ocr, schedule: [[5, 0], [5, 1]]}", "must rise"),
        ("  - {name: ocr, gate: {reward: shape, at_least: 1}}\n  - {name: shapes}", "did you mean 'shapes'"),
        ("  - {name: ocr, gate: {reward: ocr, at_least: 1}}", "no other reward is called 'ocr'"),
        ("  - {name: ocr, gate: {reward: shapes}}\n  - {name: shapes}", "at_least"),
        ("  - {name: ocr, normalize: grup}", "did you mean group"),
        (f"  - {{name: ocr, {REMOTE}, args: {{crop: ink}}}}", "rewards.0.args, rewards.0.remote: is a matter of"),
        (f"  - {{name: ocr, {REMOTE}, isolate: true}}", "is a matter of the server"),
        (f"  - {{name: ocr, {REMOTE}, outage: {{deadline_s: 600}}}}", "up to 600 s .* ended after 600 s"),
        (f"  - {{name: ocr, {REMOTE}, outage: {{policy: zero}}}}", "policy"),
        ("  - {name: ocr, batch_size: 0}", "batch_size"),
        ("  - {name: ocr, remote: '127.0.0.1:80'}", "is no URL of a server; write http://HOST:PORT"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, rewards: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path, rewards))
    assert re.search(words, " ".join(str(error.value).split())), str(error.value)


def test_what_fits_is_kept(tmp_path: Path) -> None:
    rewards = f"""\
  - {{name: ocr, weight: 2, schedule: [[0, 0], [50, 1.0]], normalize: running, cache: 100}}
  - {{name: ocr, args: {{crop: ink}}, weight: -1, gate: {{reward: ocr, at_least: 0.5, otherwise: -1}}}}
  - {{name: pickscore, {REMOTE}, outage: {{policy: drop}}}}
  - {{name: './a/b.py:Mine', isolate: {tmp_path}}}"""
    config = load(write(tmp_path, rewards))
    assert config.reward_labels == ("ocr", "ocr-2", "pickscore", "Mine")
    assert config.rewards[0].schedule == ((0, 0.0), (50, 1.0)) and config.rewards[3].isolate == str(tmp_path)


def test_places_are_checked_on_disk_where_they_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notes = check_files(load(write(tmp_path, f"  - {{name: known-there-only, {REMOTE}}}")))
    assert any("http://127.0.0.1:1 is asked when training starts" in note for note in notes)
    with pytest.raises(ConfigError, match="is not a virtual environment"):
        check_files(load(write(tmp_path, f"  - {{name: known-there-only, isolate: {tmp_path}}}")))
    with pytest.raises(ConfigError, match="unknown reward 'known-there-only'"):
        check_files(load(write(tmp_path, "  - {name: known-there-only, isolate: true}")))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("prompt", "reward ./mine.py:own asks for the column prompt.* Did you mean 'prompts'"),
        ("reference_images, style", "asks for the column style, reference_image|reference_image, style"),
    ],
)
def test_columns_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(f"def own(images, {asked}): ...\n")
    with pytest.raises(ConfigError, match=words):
        check_files(load(write(tmp_path, "  - {name: './mine.py:own'}")))


def test_what_log_tame_cannot_take_the_logarithm_of_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the declared range: the least that is usual, where it says so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        'class Low:\n    range = "about -2 to 2"\n    def __call__(self, images): ...\n\n\ndef quiet(images): ...\n'
    )

    def check(*rewards: str) -> None:
        path = write(tmp_path, "\n".join(f"  - {{name: {reward}}}" for reward in rewards))
        path.write_text(path.read_text().replace("diffusion_nft", "paco_grpo, aggregate: log_tame"))
        check_files(load(path))

    for name, says in (("imagereward", "about -2.3 to 2"), ("hpsv3", "-5 to 15"), ("./mine.py:Low", "-2 to 2")):
        words = rf"rewards.1.name: log_tame .* scores of {name} may be -1 or less \(its range: .*{says}\); .*gdpo"
        with pytest.raises(ConfigError, match=words):
            check("shapes", f"'{name}'")
        check("shapes", f"'{name}', weight: 0")
    check("imagereward")  # alone it is never tamed
    check("clipscore", "pickscore", "'./mine.py:quiet'")


@pytest.mark.parametrize(
    ("text", "least"),
    [("0 to 1", 0), ("-1 to 1, usually .1 to .4", 0.1), ("about -2.3 to 2", -2.3), ("-1 to 1", -1), ("0 up, in kB", 0),
     ("unbounded, about -1 to 1", -math.inf), ("as pickscore", None), ("usually ...", None), ("", None)],
)  # fmt: skip
def test_the_least_score_of_a_range_in_words(text: str, least: float | None) -> None:
    assert lower_end(text) == least


def test_a_column_that_a_reward_would_ignore_is_refused(tmp_path: Path) -> None:
    """A 3 x 3 picture was judged as 2 x 2 cells, though its prompt came with the right grid."""

    def check(reward: str) -> list[str]:
        path = write(tmp_path, f"  - {reward}")
        (tmp_path / "train.jsonl").write_text('{"prompt": "nine cats in a grid", "grid": "3x3"}\n' * 2)
        path.write_text(path.read_text().replace("train.txt", str(tmp_path / "train.jsonl")))
        return check_files(load(path))

    with pytest.raises(
        ConfigError, match=r"rewards\.0\.args: the prompts have a column grid.*write args: {grid: grid}"
    ):
        check("{name: paco_grid}")
    check("{name: paco_grid, args: {grid: grid}}")
    check("{name: paco_grid, args: {grid: 3x3}}")
    check("{name: clipscore}")
    (note,) = (note for note in check("{name: paco_grid, remote: 'http://127.0.0.1:1'}") if "--arg" in note)
    assert "--arg grid=grid" in note


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ('[["Which colour?", "dark blue"]]', "line 2, column vqa_list: the answer 'dark blue' .* expect one word"),
        ('[["How many?", ""]]', "the answer '' .* expect one word"),
        ('[["Which colour?"]]', r"a question is text, or a pair of text and answer, found \['Which colour\?'\]"),
        ('"Is it blue?"', "questions are a list, found 'Is it blue"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_compared_are_refused(tmp_path: Path, asked: str, words: str) -> None:
    """A run failed at its first scores, which `check` had let pass."""
    path = write(tmp_path, "  - {name: questions}")
    rows = '{"prompt": "12 cats", "vqa_list": [["How many?", "12"], "Are they cats?"]}\n'
    path.write_text(path.read_text().replace("train.txt", str(tmp_path / "train.jsonl")))
    (tmp_path / "train.jsonl").write_text(rows)
    check_files(load(path))
    (tmp_path / "train.jsonl").write_text(rows + f'{{"prompt": "a cat", "vqa_list": {asked}}}\n')
    with pytest.raises(ConfigError, match=words):
        check_files(load(path))
    (tmp_path / "train.jsonl").write_text(rows.replace("vqa_list", "asked"))
    with pytest.raises(ConfigError, match="reward questions asks for the column vqa_list; columns of every row: asked"):
        check_files(load(path))
