"""What a resume says of files that are not what they were, and which of them it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from genrl.config import dump, load
from genrl.runtime.folder import run as runs
from genrl.runtime.folder.contents import WHOLE, changed, contents, fingerprint, is_model
from genrl.runtime.folder.run import Run

FILES = {
    "prompts.txt": "a red cube\n",
    "held_out.txt": "a blue star\n",
    "warm.py": "def warm(images):\n    return images.mean(dim=(1, 2, 3))\n",
    "model/unet/config.json": "{}",
    "model/tokenizer/vocab.json": "{}",
    "model/README.md": "a page",
    "model/.cache/lock.json": "1",
}
WRITTEN = """
model: {{path: {0}/model}}
prompts: {{train: {0}/prompts.txt, eval: {0}/held_out.txt}}
rewards: [{{name: "{0}/warm.py:warm"}}]
trainer: {{algorithm: flow_grpo}}
output: {0}/run
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    save_file({"w": torch.arange(2.0 * WHOLE / 4)}, tmp_path / "model/unet/weights.safetensors")
    (tmp_path / "run.yaml").write_text(WRITTEN.format(tmp_path))
    return tmp_path


def begun(folder: Path) -> str:
    config = dump(load(folder / "run.yaml"))
    runs.start(folder / "run", config, seed=0, command=["genrl"])
    return config


def scaled(file: Path) -> None:
    save_file({name: 1.5 * value for name, value in load_file(file).items()}, file)


LINES = {
    "prompts.txt": ["prompts.train"],
    "held_out.txt": ["prompts.eval"],
    "warm.py": ["rewards.0.name"],
    "model/README.md": [],
    "model/.cache/lock.json": [],
}


@pytest.mark.parametrize("name", list(LINES))
def test_what_changed_is_one_line(folder: Path, name: str) -> None:
    """Once: the next resume compares with the present one."""
    config = begun(folder)
    (folder / name).write_text("something else")
    lines = runs.resume(folder / "run", config, step=1, command=[])
    assert lines == [f"the content of {key}: {folder / name}" for key in LINES[name]]
    assert runs.resume(folder / "run", config, step=1, command=[]) == []


@pytest.mark.parametrize("how", ["scaled", "another file", "removed", "added", "tokenizer"])
def test_another_model_is_refused(folder: Path, how: str) -> None:
    config = begun(folder)
    weights = folder / "model/unet/weights.safetensors"
    match how:
        case "scaled":
            scaled(weights)
        case "another file":
            save_file({"v": torch.ones(3)}, weights)
        case "removed":
            weights.unlink()
        case "added":
            (weights.parent / "more.safetensors").write_bytes(b"")
        case _:
            (folder / "model/tokenizer/vocab.json").write_text('{"a": 0}')
    before = Run(folder / "run").info.read_bytes()
    with pytest.raises(ValueError, match=r"what it trains is not what it began with \(model.path: .*model/"):
        runs.resume(folder / "run", config, step=1, command=[])
    assert Run(folder / "run").info.read_bytes() == before
    runs.resume(folder / "run", config, step=0, command=[])  # nothing was trained yet


def test_a_run_of_an_older_version_has_nothing_to_compare(folder: Path) -> None:
    config = begun(folder)
    run = Run(folder / "run")
    run.info.write_text('{"resumed": []}')
    scaled(folder / "model/unet/weights.safetensors")
    assert runs.resume(run.folder, config, step=1, command=[]) == []
    scaled(folder / "model/unet/weights.safetensors")
    with pytest.raises(ValueError, match="what it trains"):
        runs.resume(run.folder, config, step=1, command=[])


def test_code_of_a_model_and_edited_keys_are_no_refusal() -> None:
    assert not is_model("vlm.output: mine.py") and is_model("policy.path: p/model.safetensors")
    before = {"engine.path: a": "1", "prompts.train: b": "2", "prompts.eval: c": "3"}
    assert changed(before, {"prompts.train: d": "2", "prompts.eval: c": "3"}, {"engine.path": ""}) == [
        "prompts.train: b",
        "prompts.train: d",
    ]


def test_words_that_happen_to_be_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tensorboard", "shapes", "runs", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.json").write_text("{}")
    text = "{trackers: [tensorboard], output: runs/x, rewards: [{name: shapes}], model: {path: small}, n: 'a\\nb'}"
    assert list(contents(text)) == ["model.path: small/x.json"]


def test_runs_within_a_folder_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "m" / "run").mkdir(parents=True)
    for name in ("a.json", "run/run.json", "run/b.json"):
        (tmp_path / "m" / name).write_text("{}")
    assert list(contents(f"model: {{path: {tmp_path}/m}}")) == [f"model.path: {tmp_path}/m/a.json"]


def test_ids_of_the_hub_are_known_by_their_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--name" / "refs").mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc\n")
    assert contents("model: {path: org/name, other: org/nothing}") == {"model.path: org/name": "abc"}


@pytest.mark.parametrize("size", [10, WHOLE + 1, 3 * WHOLE + 7])
@pytest.mark.parametrize("where", ["first", "last", "size"])
def test_a_fingerprint_sees_both_ends_and_the_size(tmp_path: Path, size: int, where: str) -> None:
    file = tmp_path / "x"
    file.write_bytes(content := bytes(size))
    before = fingerprint(file)
    edited = {"first": b"1" + content[1:], "last": content[:-1] + b"1", "size": content + b"\0"}[where]
    file.write_bytes(edited)
    assert fingerprint(file) != before
