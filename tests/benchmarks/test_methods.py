"""The runs behind the table of methods: what is begun again, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import methods
from genrl.runtime.run import Run, lock


def test_a_run_that_another_process_trains_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    (run.folder / "samples").mkdir(parents=True)
    monkeypatch.setattr(methods, "run_genrl", lambda arguments: run.folder.mkdir() or 1.0)
    with lock(run.folder), pytest.raises(ValueError, match="another process is training"):
        methods.complete(run, ["train"])
    assert (run.folder / "samples").exists()
    methods.complete(run, ["train"])  # one that was left before its first checkpoint begins anew
    assert [file.name for file in run.folder.iterdir()] == ["cost.json"]
