"""Folders that are complete or not there, and files that are a folder's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from genrl.runtime.folder.whole import own_files, whole_folder


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


def test_the_old_content_survives_a_rename_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
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
