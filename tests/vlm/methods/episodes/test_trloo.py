"""TRLOO on a planner's walks: what its tokens are worth in a run, and that it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl.config import VLMConfig
from tests.run_folders import differences, rows
from tests.vlm import vlm_runs
from tests.vlm.methods.episodes import agent_runs


def config(place: Path, **changes: Any) -> VLMConfig:
    sections: dict[str, Any] = {
        "vlm": {"path": str(agent_runs.MODEL)},
        "task": None,
        "rewards": None,
        "environment": {"name": "trajectories", "options": {"patches": 3}},
        "generation": {"prompts_per_iteration": 2, "group_size": 4, "max_new_tokens": 6},
        "trainer": {"preset": "trloo"},
        "evaluation": {"every": 0, "questions": 4},
    }
    return vlm_runs.config(place, **{**sections, **changes})


def test_each_token_has_the_advantage_of_its_turn(tmp_path: Path) -> None:
    trainer = {"preset": "trloo", "advantage": {"gamma": 0.5}}
    with agent_runs.opened(config(tmp_path, trainer=trainer)) as run:
        acted, _ = run.act()
        ready, _ = run.estimate(acted)
    advantage = ready.batch.advantage
    assert advantage is not None and len(acted.played) == 8 and {len(one) for one in acted.played} != {1}
    worth = [
        [sum(0.5**j * one.reward for j, one in enumerate(row[k:])) for k in range(len(row))] for row in acted.played
    ]
    for row, episode in enumerate(acted.played):
        place, mates = 0, [other for other in range(row // 4 * 4, row // 4 * 4 + 4) if other != row]
        for k, one in enumerate(episode):
            others = [worth[other][k] for other in mates if len(worth[other]) > k]
            wanted = worth[row][k] - (np.mean(others) if others else 0.0)
            found = advantage[row, place : place + int(one.mask.sum())]
            torch.testing.assert_close(found, torch.full_like(found, wanted), atol=1e-6, rtol=0)
            place += len(found)
        assert (advantage[row, place:] == 0).all()


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, resumed = vlm_runs.whole_and_resumed(tmp_path, config)
    assert differences(whole, resumed) == []
    assert all(row["grad_norm"] > 0 for row in rows(whole))


def test_it_does_not_learn_from_questions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="turns are of episodes: write environment"):
        vlm_runs.config(tmp_path, trainer={"preset": "trloo"})
