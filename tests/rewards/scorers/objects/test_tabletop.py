"""The table's judge reads off pictures what the simulator knows."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch

import genrl_rewards
from genrl.playground.minitable import INSTRUCTIONS, PUT, TOUCH, State, expert_chunk, render, task
from genrl_rewards.scorers.objects import tabletop


def scores(state: State, prompts: list[str], size: int = 32) -> list[float]:
    images = torch.from_numpy(render(state, size)).movedim(-1, 1).float() / 255.0
    return genrl_rewards.score(genrl_rewards.load("table_progress"), images=images, prompts=prompts).values


@pytest.mark.parametrize("tasks", [PUT, TOUCH])
def test_the_way_that_is_left_is_seen(tasks: tuple[int, ...]) -> None:
    state = task.initial_state(task.episode_keys(0, np.arange(100), np.zeros(100)), tasks)
    found = scores(state, [INSTRUCTIONS[number] for number in state.task])
    colour = np.where(state.task < 9, state.task // 3, state.task - 9)
    disc = state.discs[np.arange(100), colour]
    expected = -np.linalg.norm(disc - state.gripper, axis=1)
    if tasks == PUT:
        expected -= np.maximum(np.linalg.norm(disc - task.ZONE_CENTRES[state.task % 3], axis=1) - 0.2, 0.0)
    np.testing.assert_allclose(found, expected, atol=0.05)


def test_an_experts_episode_gets_better_and_better() -> None:
    state = task.initial_state(task.episode_keys(1, np.arange(40), np.zeros(40)), PUT)
    prompts = [INSTRUCTIONS[number] for number in state.task]
    column = [scores(state, prompts)]
    for _ in range(16):
        state = task.step(state, expert_chunk(state, 1)[:, 0])
        column.append(scores(state, prompts))
    table = np.array(column)
    assert (np.diff(table, axis=0) > -0.06).mean() > 0.98 and (table[-1] > -0.1).mean() > 0.9


def test_what_it_cannot_judge_has_no_score() -> None:
    state = task.initial_state(task.episode_keys(0, np.arange(2), np.zeros(2)), PUT)
    assert all(math.isnan(value) for value in scores(state, ["open the drawer", "put the pink block in the left zone"]))
    empty = np.full((32, 32, 3), 230, dtype=np.uint8)
    assert math.isnan(tabletop.progress(empty, "touch the red block"))


def test_colours_and_zones_are_those_of_the_table() -> None:
    drawn = importlib.import_module("genrl.playground.minitable.render")  # the package has a function of that name
    assert tuple(tabletop.COLOURS.values()) == drawn._DISC_COLOURS and tabletop.VIEW == drawn.VIEW
    assert (drawn._OPEN, drawn._CLOSED) == (tabletop.OPEN, tabletop.CLOSED)
    assert tuple(tabletop.COLOURS) == task.COLOURS and tuple(tabletop.ZONES) == task.ZONES
    np.testing.assert_allclose(list(tabletop.ZONES.values()), task.ZONE_CENTRES)
    assert tabletop.ZONE_RADIUS == task.ZONE_RADIUS
