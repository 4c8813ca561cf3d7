"""What chooses among FISOR's samples, on a run of a few updates, whose actor hardly knows a hazard."""

from pathlib import Path

import pytest

from benchmarks.fisor_choice import judged, trained
from genrl.config import load
from genrl.vla.train import train
from tests.run_folders import rows

SMALL = (
    *("trainer.episodes=12", "trainer.steps_per_iteration=3", "trainer.candidates=4"),
    *("evaluation.episodes=48", "evaluation.every=1", "evaluation.videos=0", "environment.max_steps=12"),
    *("iterations=1", "trackers=[]"),
)


@pytest.mark.slow
def test_the_simulator_enters_no_hazard_that_a_sample_avoids(root: Path, tmp_path: Path) -> None:
    config = load(root / "configs" / "vla" / "fisor.yaml", [*SMALL, f"output={tmp_path}"])
    folder = train(config)  # type: ignore[arg-type]
    run = trained(folder)
    own = judged(run, "q_h", 4)
    last = rows(folder)[-1]
    assert {name: last[name] for name in own if name.startswith("eval/")} == pytest.approx(
        {name: value for name, value in own.items() if name.startswith("eval/")}
    )
    assert own["could_stay_out"] > 0 and own["could_leave"] <= own["stayed"]
    for choice in ("next", "following"):
        found = judged(run, choice, 4)
        if choice == "next":  # what is told of a whole episode
            assert found["could_stay_out"] == found["could_leave"] == 0
        assert found["eval/cost_mean"] * 48 == pytest.approx(found["entered"] + found["stayed"])
        assert found["entered"] < own["entered"]
