"""What several processes make of an iteration."""

from __future__ import annotations

import pytest

from benchmarks import scaling


def test_an_iteration_waits_for_the_slowest_between_two_collectives() -> None:
    """Work 3 and 1, then 1 and 2: mean 3.5, critical path 5; collectives .1 and .2 by whoever came last."""
    one = {"work": [3.0, 1.0], "collectives": [0.4], "bytes": {"all_reduce": 12}, "wall": 9.0}
    other = {"work": [1.0, 2.0], "collectives": [0.1], "bytes": {"all_reduce": 12}, "wall": 8.0}
    found = scaling.summary([[one], [other]])
    assert found == {
        "work": 3.5,
        "waiting": 1.5,
        "collectives": 0.1,
        "iteration": pytest.approx(5.1),
        "wall": 9.0,
        "number_of_collectives": 1.0,
        "bytes": {"all_reduce": 12},
    }


@pytest.mark.slow
def test_two_processes() -> None:
    tiny = (
        *("sampling.prompts_per_iteration=1", "sampling.group_size=4", "sampling.batch_size=4"),
        *("sampling.num_inference_steps=2", "trainer.timesteps_per_sample=1", "trainer.updates_per_iteration=1"),
    )
    found = scaling.measure("configs/quickstart.yaml", 2, 1, tiny)
    assert found["pictures"] == 8 and found["number_of_collectives"] >= 2  # scores and gradients at least
    assert 0 < found["collectives"] and found["work"] <= found["iteration"] <= 1.5 * found["wall"]
    assert len(found["ranks"]) == 2 and found["ranks"][0] != found["ranks"][1]
