"""An iteration over its bare calls."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import overhead
from benchmarks.common import Seconds
from genrl.config import load

TINY = (
    *("sampling.prompts_per_iteration=1", "sampling.group_size=4", "sampling.batch_size=4"),
    *("sampling.num_inference_steps=3", "trainer.window={size: 1, high: 2}"),
    *("evaluation.every=0", "trackers=[]", "checkpoint.every=100", "iterations=3"),
)


def test_the_bare_loop_makes_the_calls_of_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sampling calls and a decoding without gradient, one call of training with it; parts add up to phases."""
    made: list[list[tuple[str, bool]]] = []
    bare = overhead.bare

    def counted(calls: list[Any]) -> dict[str, Seconds]:
        made.append([(phase, call[3]) for phase, call in calls])
        return bare(calls)

    monkeypatch.setattr(overhead, "bare", counted)
    found = overhead.measure(load("configs/flow_grpo.yaml", TINY))  # type: ignore[arg-type]
    sampling = [("sample", False)] * 3 + [("decode", False)]
    gate = ("train", False)  # once in a run: whether replay gives what was recorded
    assert made == [[*sampling, gate, ("train", True)], *[[*sampling, ("train", True)]] * 2]
    whole = found["all"]
    assert len(whole["ratios"]) == 2 and whole["ratio"] > 0.5
    parts = {part: seconds for part, seconds in found["parts"].items() if part not in ("score", "outside")}
    assert sum(parts.values()) == pytest.approx(whole["iteration_s"], rel=0.1)  # medians of two
    assert min(parts[name] for name in ("forward", "backward", "pipeline", "optimizer")) > 0
