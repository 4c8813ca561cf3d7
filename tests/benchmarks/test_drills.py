"""A short form of every drill on runs: nothing is lost, nothing is wrong."""

from __future__ import annotations

import pytest

from benchmarks import drills
from benchmarks.drills import DRILLS, run_drill

FEW = {
    "killed at random": 1,
    "bits of a manifest flipped": 100,
    "stopped": 1,
    "two starters": 1,
    "NaN": 1,
    "mutated requests": 100,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # deprecations within diffusers
@pytest.mark.parametrize("name", [name for name in DRILLS if name != "killed on Ray"])  # diffusion/rollout kills there
def test_a_short_drill(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(drills.ROOT)
    for row in run_drill(name, FEW.get(name)):
        if not row.tries:
            pytest.skip(row.drill)
        assert row.survived == row.tries, row
