"""UI-S1 on a planner's walks: what its tokens are worth, which groups are played again, and that it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl.config import VLMConfig
from tests.run_folders import differences
from tests.vlm import vlm_runs
from tests.vlm.methods.episodes import agent_runs

GENERATION = {"prompts_per_iteration": 2, "group_size": 4, "max_new_tokens": 6}


def config(place: Path, **changes: Any) -> VLMConfig:
    sections: dict[str, Any] = {
        "vlm": {"path": str(agent_runs.MODEL)},
        "task": None,
        "rewards": None,
        "environment": {"name": "trajectories", "options": {"patches": 3}},
        "generation": GENERATION,
        "trainer": {"preset": "ui_s1"},
        "evaluation": {"every": 0, "questions": 4},
    }
    return vlm_runs.config(place, **{**sections, **changes})


def test_each_token_has_the_credit_of_its_turn(tmp_path: Path) -> None:
    with agent_runs.opened(config(tmp_path)) as run:
        acted, _ = run.act()
        ready, _ = run.estimate(acted)
    episodes, advantage = acted.played, ready.batch.advantage
    assert advantage is not None and len(episodes) == 8 and {len(one) for one in episodes} != {1}
    totals = np.array([sum(one.reward for one in episode) for episode in episodes]).reshape(2, 4)
    whole = ((totals - totals.mean(1, keepdims=True)) / (totals.std(1, ddof=1, keepdims=True) + 1e-6)).flatten()
    for row, episode in enumerate(episodes):
        place, mates = 0, episodes[row // 4 * 4 : row // 4 * 4 + 4]
        for k, one in enumerate(episode):

            def brings(other: Any, at: int) -> float:
                later = 0.5 * brings(other, at + 1) if at + 1 < len(other) and other[at + 1].matched else 0.0
                return other[at].reward + (later if other[at].matched else 0.0)

            values = [brings(other, k) for other in mates if len(other) > k]
            spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
            own = (brings(episode, k) - np.mean(values)) / (spread + 1e-6) if len(set(values)) > 1 else 0.0
            tokens = int(one.mask.sum())
            found = advantage[row, place : place + tokens]
            torch.testing.assert_close(found, torch.full_like(found, whole[row] + own), atol=1e-5, rtol=1e-5)
            place += tokens
        assert (advantage[row, place:] == 0).all()


def test_groups_that_hardly_differ_are_played_again_from_other_starts(tmp_path: Path) -> None:
    trainer = {"preset": "ui_s1", "advantage": {"spread": 100.0, "rounds": 3}}
    with agent_runs.opened(config(tmp_path, trainer=trainer)) as run:
        seeds: list[dict[int, int]] = []
        begin = run.table.begin
        run.table.begin = lambda given, split: (seeds.append(dict(given)), begin(given, split))[1]  # type: ignore[method-assign, func-returns-value]
        acted, _ = run.act()
    starts = [one for one in seeds if len(one) == 8]
    assert len(starts) == 3 and len({tuple(one.values()) for one in starts}) == 3
    assert all(len(set(list(one.values())[:4])) == 1 for one in starts), "a group begins alike"
    assert len(acted.played) == 8


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, resumed = vlm_runs.whole_and_resumed(tmp_path, config)
    assert differences(whole, resumed) == []


def test_it_does_not_learn_from_questions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="turns are of episodes: write environment"):
        vlm_runs.config(tmp_path, trainer={"preset": "ui_s1"})
