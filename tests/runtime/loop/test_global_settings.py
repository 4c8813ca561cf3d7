"""What code of others changes for the whole process is put back, and said once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from genrl.runtime.loop.global_settings import _SETTINGS, GlobalSettings
from tests.runtime.loop.loops import loop

CHANGES: dict[str, Callable[[], object]] = {
    "the current folder": lambda: os.chdir("/"),
    "torch's number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's float32 matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
}


@pytest.mark.parametrize("name", list(_SETTINGS))
def test_a_change_is_put_back(name: str, caplog: pytest.LogCaptureFixture) -> None:
    get, put = _SETTINGS[name]
    before, settings = get(), GlobalSettings()
    try:
        for _ in range(2):
            CHANGES[name]()
            assert get() != before
            settings.put_back()
            assert get() == before
    finally:
        put(before)
    assert len(caplog.messages) == 1 and name in caplog.text


def test_a_removed_folder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = GlobalSettings()
    (tmp_path / "inner").mkdir()
    os.chdir(tmp_path / "inner")
    (tmp_path / "inner").rmdir()
    settings.put_back()
    assert Path.cwd() == tmp_path


def test_each_phase_and_iteration_begins_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = loop(tmp_path)
    for _ in one.iterations():
        os.chdir("/")
        one.phase("training")
        assert Path.cwd() == tmp_path
        os.chdir("/")
        break
    next(one.iterations())
    assert Path.cwd() == tmp_path
