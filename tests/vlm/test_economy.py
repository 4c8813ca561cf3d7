"""Runs of language models that choose questions, and train on some answers of each group."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.runtime.loop import economy
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.rollout.rollout import totals
from tests.vlm import vlm_runs

ECONOMY = {"selection": {"by": "success", "candidates": 2, "replay": {}}, "keep": 2}


@pytest.fixture(autouse=True)
def _asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(economy, "COOLDOWN", 0)


def config(place: Path, **changes: Any) -> VLMConfig:
    return vlm_runs.config(place, **{"economy": ECONOMY, "task": {"rows": 12}, **changes})


def test_the_answers_with_most_variance_are_trained_on(tmp_path: Path) -> None:
    with vlm_runs.opened(config(tmp_path)) as run:
        for _ in run.loop.iterations():
            answers, row = run.draw()
            assert answers.size == 2 and len(answers.texts) == 2 * len(answers.rows) == 8
            ready = run.estimate(answers)
            chosen = ready.found.batch
            assert torch.equal(chosen.rewards, totals(run.config, answers.scores)) and len(chosen.group.unique()) == 4
            assert row["reward/total_mean"] != pytest.approx(float(chosen.rewards.mean())), "metrics are of all answers"
            break


def test_resampling_looks_at_new_questions_and_learns_from_each_round(tmp_path: Path) -> None:
    trainer = {"preset": "dapo", "filter": "spread", "resample": 3}
    with vlm_runs.opened(config(tmp_path, trainer=trainer, task={"rows": 200})) as run:
        for _ in run.loop.iterations():
            _, row = run.draw()
            known, rounds = economy.of(run.loop.memory), int(row["rollout/rounds"])
            assert rounds > 1 and len(known) == 4 * rounds and run.loop.memory["questions"] == 8 * rounds
            break
