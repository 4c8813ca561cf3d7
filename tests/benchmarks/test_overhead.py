"""An iteration over its bare calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


def test_ratios_are_of_neighbours() -> None:
    """Rounds 2 / 1, 6 / 2 and 8 / 4, of which the machine was twice as slow in the last: the median is 2."""
    rounds = [
        {
            "spent": {("sample", "forward"): Seconds(a, a), ("finish", "the rest"): Seconds(9.0, 9.0)},
            "bare": {phase: Seconds(b if phase == "sample" else 0.0, b) for phase in ("sample",)},
        }
        for a, b in ((2.0, 1.0), (6.0, 2.0), (8.0, 4.0))
    ]
    assert overhead.over_phases(rounds, ("sample",))["ratio"] == 2.0
    assert overhead.over_phases(rounds, ("sample",))["ratios"] == [2.0, 3.0, 2.0]


def test_bare_calls_go_backward_where_the_iteration_did() -> None:
    layer = torch.nn.Linear(3, 2)
    calls = [
        ("sample", (layer.forward, (torch.ones(1, 3),), {}, False)),
        ("train", (lambda x: (layer(x),), (torch.ones(1, 3),), {}, True)),
    ]
    spent = overhead.bare(calls[:1])
    assert layer.weight.grad is None and spent["sample"].wall > 0 == spent["train"].wall
    overhead.bare(calls)
    assert torch.equal(layer.weight.grad, torch.ones(2, 3))
