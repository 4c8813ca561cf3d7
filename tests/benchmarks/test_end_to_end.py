"""Rates and the reward gained, of trainers that take turns."""

from __future__ import annotations

import pytest

from benchmarks import end_to_end

TINY = (
    *("sampling.prompts_per_iteration=1", "sampling.group_size=4", "sampling.batch_size=4", "evaluation.num_prompts=2"),
    "sampling.num_inference_steps=3",
)
WINDOW = ("trainer.window={size: 2, high: 2}",)


def test_rows_take_turns_and_their_figures_follow_from_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(end_to_end.ROWS, "window of 3", (end_to_end.FLOW, *WINDOW))
    names = ("window of 3", "DiffusionNFT")
    found = end_to_end.measure(3, names, 0.0, TINY)
    assert [row["calls_per_picture"] for row in found.values()] == [[3.0, 2.0], [3.0, 2.0]]
    for row in found.values():
        assert row["iterations"] == 2 and row["pictures"] == 4 and row["held_out_pictures"] == 2 and row["seed"] == 3
        assert row["pictures_per_cpu_s"] == pytest.approx(4 / row["iteration_cpu_s"][1])
        assert 0 < row["scorer_share"] < 1
        assert row["cpu_minutes"] == pytest.approx(sum(row["iteration_cpu_s"]) / 60)
        before, after = row["reward"]
        assert row["gain_per_cpu_minute"] == pytest.approx((after - before) / row["cpu_minutes"])


def test_whole_runs_by_hand() -> None:
    """0.2 in two minutes; a run on another scorer, or of unknown cost, is left out."""
    run = {
        "cpu_s": 120.0,
        "trained": ["shapes"],
        "logged": ["clipscore"],
        "curve": {"kcalls": [0, 9, 10], "eval/shapes_mean": [0.4, 0.9, 0.6], "eval/clipscore_mean": [0.5, None, 0.4]},
    }
    others = {"jpeg-0": run | {"trained": ["jpeg"]}, "awm-0": run | {"cpu_s": None}}
    found = end_to_end.whole_runs({"crd-1": run, "crd-0": run, **others})
    assert list(found) == ["crd"] and found["crd"] == [pytest.approx([0.1, -0.05])] * 2
