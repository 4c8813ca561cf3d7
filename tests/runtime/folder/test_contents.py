"""What a resume says of files that are not what they were, and which of them it refuses."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from genrl.config import dump, load
from genrl.runtime.folder import run as runs
from genrl.runtime.folder.contents import WHOLE, changed, contents, fingerprint, is_model
from genrl.runtime.folder.hub import own_files, whole_folder
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


MODELS: dict[str, Callable[[Path], object]] = {
    "scaled": scaled,
    "another file": lambda weights: save_file({"v": torch.ones(3)}, weights),
    "removed": Path.unlink,
    "added": lambda weights: weights.with_name("more.safetensors").write_bytes(b""),
    "tokenizer": lambda weights: (weights.parents[1] / "tokenizer/vocab.json").write_text('{"a": 0}'),
}


@pytest.mark.parametrize("how", list(MODELS))
def test_another_model_is_refused(folder: Path, how: str) -> None:
    config = begun(folder)
    weights = folder / "model/unet/weights.safetensors"
    MODELS[how](weights)
    before = Run(folder / "run").info.read_bytes()
    with pytest.raises(ValueError, match=r"what it trains is not what it began with \(model.path: .*model/"):
        runs.resume(folder / "run", config, step=1, command=[])
    assert Run(folder / "run").info.read_bytes() == before
    runs.resume(folder / "run", config, step=0, command=[])  # nothing was trained yet


def test_code_of_a_model_and_edited_keys_are_no_refusal() -> None:
    assert not is_model("vlm.output: mine.py") and is_model("policy.path: p/model.safetensors")
    before = {"engine.path: a": "1", "prompts.train: b": "2", "prompts.eval: c": "3"}
    edited = changed(before, {"prompts.train: d": "2", "prompts.eval: c": "3"}, {"engine.path": ""})
    assert edited == ["prompts.train: b", "prompts.train: d"]


def test_words_that_happen_to_be_folders_and_runs_within_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tensorboard", "shapes", "runs", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.json").write_text("{}")
    text = "{trackers: [tensorboard], output: runs/x, rewards: [{name: shapes}], model: {path: small}, n: 'a\\nb'}"
    assert list(contents(text)) == ["model.path: small/x.json"]
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


# -- Folders that are complete or not there, and files that are a folder's own
def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


BEFORE = {"new": None, "empty": {}, "used": {"lora.safetensors": "old", "more": "old"}}


@pytest.mark.parametrize("before", list(BEFORE))
@pytest.mark.parametrize("ends", ["well", "OSError", "KeyboardInterrupt"])
def test_it_is_complete_or_as_it_was(tmp_path: Path, before: str, ends: str) -> None:
    final = tmp_path / "deep" / "lora"
    files = BEFORE[before]
    if files is not None:
        final.mkdir(parents=True)
        for name, text in files.items():
            (final / name).write_text(text)
    error = {"OSError": OSError(28, "No space left"), "KeyboardInterrupt": KeyboardInterrupt()}.get(ends)
    try:
        with whole_folder(final) as place:
            (place / "in").mkdir()
            (place / "lora.safetensors").write_text("new")
            (place / "in" / "deeper").write_text("new")
            assert "lora.safetensors" not in content(final) or files
            if error is not None:
                raise error
    except (OSError, KeyboardInterrupt) as met:
        assert met is error
    if ends == "well":
        assert content(final) == {"lora.safetensors": "new", "in/deeper": "new"}
    else:
        assert content(final) == (files or {}) and final.exists() == (files is not None)
    assert not list(tmp_path.rglob(".*"))


def test_the_old_survives_a_rename_that_fails_and_leftovers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final, rename = tmp_path / "lora", Path.rename
    final.mkdir()
    (final / "x").write_text("old")

    def refused(self: Path, target: Path) -> Path:
        if ".lora.tmp-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="Input"), whole_folder(final) as place:
        (place / "x").write_text("new")
    assert content(tmp_path) == {"lora/x": "old"}
    monkeypatch.undo()
    final.rename(tmp_path / ".lora-old.tmp-1")  # killed between the two renames
    with pytest.raises(KeyboardInterrupt), whole_folder(final):
        raise KeyboardInterrupt
    assert content(tmp_path) == {"lora/x": "old"}
    for name in (".lora.tmp-1", ".lora-old.tmp-1", ".lora2.tmp-1"):
        (tmp_path / name).mkdir()
    with whole_folder(tmp_path / "lora") as place:
        (place / "x").write_text("")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lora2.tmp-1", "lora"]


def test_links_that_lead_out_are_nobodys_files(tmp_path: Path) -> None:
    """The kinds: absolute, relative, through a folder, broken, to a folder; one that stays inside is a file."""
    model, secret = tmp_path / "model", tmp_path / "secret.json"
    (model / "sub").mkdir(parents=True)
    secret.write_text("key")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "key").write_text("key")
    (model / "config.json").write_text("{}")
    (model / "same.json").symlink_to("config.json")
    (model / "absolute.json").symlink_to(secret)
    (model / "relative.json").symlink_to("../secret.json")
    (model / "door").symlink_to(tmp_path / "elsewhere")
    (model / "through.json").symlink_to("door/key")
    (model / "broken.json").symlink_to("nothing")
    (model / "twice.json").symlink_to("absolute.json")
    assert [file.name for file in own_files(model)] == ["config.json", "same.json"]
    (tmp_path / "link").symlink_to(model)
    assert [file.name for file in own_files(tmp_path / "link")] == ["config.json", "same.json"]


def test_links_of_the_hubs_cache_are_the_folders_own(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    (blobs / "1").write_text("{}")
    (tmp_path / "secret").write_text("key")
    (snapshot / "config.json").symlink_to(os.path.join("..", "..", "blobs", "1"))
    (snapshot / "out.json").symlink_to(tmp_path / "secret")
    assert [file.name for file in own_files(snapshot)] == ["config.json"]
