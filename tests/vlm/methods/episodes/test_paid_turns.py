"""TRLOO and UI-S1 on a planner's walks: what the tokens of a turn are worth, which groups are played again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.recipe.advantages import SemiOnline
from tests.vlm import vlm_runs
from tests.vlm.methods.episodes import agent_runs


def config(place: Path, trainer: dict[str, Any], **changes: Any) -> VLMConfig:
    sections: dict[str, Any] = {
        "vlm": {"path": str(agent_runs.MODEL)},
        "task": None,
        "rewards": None,
        "environment": {"name": "trajectories", "options": {"patches": 3}},
        "generation": {"prompts_per_iteration": 2, "group_size": 4, "max_new_tokens": 6},
    }
    return vlm_runs.config(place, trainer=trainer, **sections, **changes)


def left_out(row: int, turn: int, played: list[Any]) -> float:
    """TRLOO, gamma .5: the return from a turn on, less the mean of the others' at that turn."""

    def worth(episode: Any) -> float:
        return sum(0.5**j * one.reward for j, one in enumerate(episode[turn:]))

    mates = [k for k in range(row // 4 * 4, row // 4 * 4 + 4) if k != row and len(played[k]) > turn]
    return worth(played[row]) - (np.mean([worth(played[k]) for k in mates]) if mates else 0.0)


def semi_online(row: int, turn: int, played: list[Any]) -> float:
    """UI-S1: z-scores of the episode's total, and of what a turn brings as far as it was the expert's."""
    totals = np.array([sum(one.reward for one in episode) for episode in played]).reshape(2, 4)
    whole = ((totals - totals.mean(1, keepdims=True)) / (totals.std(1, ddof=1, keepdims=True) + 1e-6)).flatten()

    def brings(other: Any, at: int) -> float:
        later = 0.5 * brings(other, at + 1) if at + 1 < len(other) and other[at + 1].matched else 0.0
        return other[at].reward + (later if other[at].matched else 0.0)

    values = [brings(other, turn) for other in played[row // 4 * 4 : row // 4 * 4 + 4] if len(other) > turn]
    spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
    own = (brings(played[row], turn) - np.mean(values)) / (spread + 1e-6) if len(set(values)) > 1 else 0.0
    return float(whole[row] + own)


@pytest.mark.parametrize(
    ("trainer", "wanted"),
    [({"preset": "trloo", "advantage": {"gamma": 0.5}}, left_out), ({"preset": "ui_s1"}, semi_online)],
)
def test_each_token_has_the_advantage_of_its_turn(trainer: dict[str, Any], wanted: Any, tmp_path: Path) -> None:
    with agent_runs.opened(config(tmp_path, trainer)) as run:
        acted, _ = run.act()
        ready, _ = run.estimate(acted)
    advantage = ready.batch.advantage
    assert advantage is not None and len(acted.played) == 8 and {len(one) for one in acted.played} != {1}
    for row, episode in enumerate(acted.played):
        place = 0
        for turn, one in enumerate(episode):
            found = advantage[row, place : place + int(one.mask.sum())]
            expected = torch.full_like(found, wanted(row, turn, acted.played))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            place += len(found)
        assert (advantage[row, place:] == 0).all()


def test_groups_that_hardly_differ_are_played_again_from_other_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SemiOnline, "spread", 100.0)
    monkeypatch.setattr(SemiOnline, "rounds", 3)
    with agent_runs.opened(config(tmp_path, {"preset": "ui_s1"})) as run:
        seeds: list[dict[int, int]] = []
        begin = run.table.begin
        run.table.begin = lambda given, split: (seeds.append(dict(given)), begin(given, split))[1]  # type: ignore[method-assign, func-returns-value]
        acted, _ = run.act()
    starts = [one for one in seeds if len(one) == 8]
    assert len(starts) == 3 and len({tuple(one.values()) for one in starts}) == 3
    assert all(len(set(list(one.values())[:4])) == 1 for one in starts), "a group begins alike"
    assert len(acted.played) == 8


@pytest.mark.parametrize("preset", ["trloo", "ui_s1"])
def test_they_do_not_learn_from_questions(preset: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="turns are of episodes: write environment"):
        vlm_runs.config(tmp_path, trainer={"preset": preset})
