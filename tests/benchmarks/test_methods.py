"""The table of docs/results.md."""

from __future__ import annotations

from typing import Any

from benchmarks.methods import METHODS, table


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
