"""The situations in which presets are compared, and what is called ahead or behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import vlm_claims
from benchmarks.vlm_claims import CLAIMS, at, compared, interval, page, verdict
from genrl.config import load
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.rollout.data import Questions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", CLAIMS)
def test_every_run_holds_and_methods_of_a_claim_sample_as_many_answers_a_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    claim = CLAIMS[name]
    found = set()
    for changes in claim.methods.values():
        config = load(f"configs/vlm/{claim.config}.yaml", [*claim.changes, *changes])
        assert isinstance(config, VLMConfig)
        generation, optimizer = config.generation, config.optimizer
        answers = generation.prompts_per_iteration * generation.group_size
        found.add((answers, optimizer.lr, config.vlm.path, config.task.name))
    assert len(found) == 1 and Questions(config, "train")[0].columns["answer"]


def test_equal_runs_are_compared_at_their_ends() -> None:
    points = [(0.0, 0.1), (50.2, 0.5), (102.9, 0.9)]
    assert at(points, 100.0) == 0.9 and at(points, 99.0) == 0.5 and at(points, 0.0) == 0.1


def test_the_interval_is_students() -> None:
    differences = np.array([0.1, 0.3, 0.2])
    middle, low, high = interval([0.6, 0.9, 0.7], [0.5, 0.6, 0.5])
    half = 4.3026527 * differences.std(ddof=1) / np.sqrt(3)  # the 97.5 % quantile for two degrees of freedom
    assert [middle, low, high] == pytest.approx([0.2, 0.2 - half, 0.2 + half], abs=1e-4)
    assert [verdict(0.01, 0.2), verdict(-0.2, -0.01), verdict(-0.1, 0.1)] == ["ahead", "behind", "no difference shown"]


def test_only_seeds_that_all_methods_have_are_compared() -> None:
    def run(end: float) -> vlm_claims.Summary:
        return {"curves": {"accuracy": [(0.0, 0.3), (100.0, end)], "rating": [(0.0, 0.2), (100.0, 0.4)]}}

    results = {f"quality-grpo-{seed}": run(0.5 + seed / 100) for seed in (0, 1, 2, 3)}
    results |= {f"quality-q_hawkeye-{seed}": run(0.6 + seed / 100) for seed in (0, 1, 2)}
    (grpo, ours), tokens = compared("quality", results)
    assert tokens == 100.0 and grpo.apart is None and grpo.start == 0.3 and grpo.each == [0.5, 0.51, 0.52]
    assert ours.apart == pytest.approx((0.1, 0.1, 0.1)) and ours.also == {"rating": 0.4}
    text = page(results)
    assert "- **ahead**: `q_hawkeye` on `quality` (+0.100, +0.100 to +0.100)." in text
    assert "- **behind**: none." in text and "3 seeds, 100 thousand tokens each." in text
