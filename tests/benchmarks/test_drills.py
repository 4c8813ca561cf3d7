"""A short form of every drill on runs: nothing is lost, nothing is wrong."""

import pytest

from benchmarks import drills
from benchmarks.drills import DRILLS, run_drill

FEW = {name: 1 for name in ("killed at random", "stopped", "two starters", "NaN")}
FEW |= {"bits of a manifest flipped": 20, "mutated requests": 30}
KIND = "policy in simulation"  # the lightest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # deprecations within diffusers
@pytest.mark.parametrize("name", [name for name in DRILLS if name != "killed on Ray"])  # diffusion/rollout kills there
def test_a_short_drill(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(drills.ROOT)
    monkeypatch.setattr(drills, "KINDS", {KIND: drills.KINDS[KIND]})
    for row in run_drill(name, FEW.get(name)):
        if not row.tries:
            pytest.skip(row.drill)
        assert row.survived == row.tries, row
