"""A folder to run commands in."""

from pathlib import Path

import pytest

from tests.cli.commands import SMALL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a small configuration, its prompts and its reward."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("RANK", "GENRL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "train.txt").write_text("a red circle\na blue star\nthree stars\n")
    (tmp_path / "eval.txt").write_text("a green square\ntwo circles\n")
    (tmp_path / "mine.py").write_text("def brightness(images):\n    return images.mean(dim=(1, 2, 3))\n")
    return tmp_path
