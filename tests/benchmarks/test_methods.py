"""The table of docs/results.md, and the runs behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import methods
from benchmarks.methods import METHODS, table
from genrl.runtime.folder.run import Run, lock


def _run(diversity: list[float] | None) -> dict[str, Any]:
    curves = {"total": [(0.0, 0.5), (1.0, 0.6)]}
    counts = {"iterations": 2, "sampling_calls": 600.0, "training_calls": 400.0, "cpu_s": None}
    return {"trained": ["shapes"], "logged": [], "curves": curves, **counts, "diversity": diversity}


def test_diversity_of_all_seeds_that_have_it() -> None:
    old = _run(None)
    del old["diversity"]  # stored before it was measured
    shown = {name: METHODS[name] for name in ("awm", "ddpo", "dpo")}
    results = {"awm": [_run([0.2, 0.1]), _run([0.2, 0.12])], "ddpo": [old, _run([0.2, 0.125])], "dpo": [old]}
    cells = [line.split(" | ")[4] for line in table(shown, results).splitlines()[2:]]
    assert cells == ["0.200 → **0.110** ± 0.014 (0.100, 0.120)", "0.200 → 0.125", "–"]


def test_a_run_that_another_process_trains_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    (run.folder / "samples").mkdir(parents=True)
    monkeypatch.setattr(methods, "run_genrl", lambda arguments: run.folder.mkdir() or 1.0)
    with lock(run.folder), pytest.raises(ValueError, match="another process is training"):
        methods.complete(run, ["train"])
    assert (run.folder / "samples").exists()
    methods.complete(run, ["train"])  # one that was left before its first checkpoint begins anew
    assert [file.name for file in run.folder.iterdir()] == ["cost.json"]
