"""The stand-in does the work that the first row of ours does."""

from __future__ import annotations

import pytest

from benchmarks import peer_flow_grpo

TINY = ("sampling.group_size=2", "sampling.batch_size=2", "sampling.num_inference_steps=3")


@pytest.mark.slow
def test_calls_of_the_stand_in_and_of_ours() -> None:
    """Two prompts x 2, 3 steps under guidance, of which 2 are trained; the stand-in checks that its ratios are 1."""
    names = ("the same in genrl", "+ graphs of sampling kept")
    found = peer_flow_grpo.measure(1, names, TINY)
    usual, same, kept = (found[name] for name in (peer_flow_grpo.FIRST, *names))
    for row, training in ((usual, 4.0), (same, 4.0), (kept, 0.0)):
        assert (row["sample_calls"], row["train_calls"]) == (6.0, training)
    assert usual["times_faster"] == 1.0 and len(kept["rounds"]) == 1
    whole = [row["rounds"][0]["sample"].cpu + row["rounds"][0]["train"].cpu for row in (usual, same)]
    assert same["times_faster"] == pytest.approx(whole[0] / whole[1])
