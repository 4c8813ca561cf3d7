"""Play: somebody moves discs about without being told to, which is what a world model learns from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from genrl.playground.minitable import task
from genrl.playground.minitable.task import INSTRUCTIONS, PUT, Flags, Floats, Keys, State


class Play(NamedTuple):
    """observations float32 [n, T + 1, 9] (gripper, whether it holds, discs), actions float32 [n, T, 3]."""

    observations: Floats
    actions: Floats


class Walk(NamedTuple):
    """The expert's episodes: observations float32 [n, T + 1, 9], chunks float32 [n, T, H, 3] from each of the first T;
    done bool [n, T]: fulfilled; counted bool [n, T]: not yet over; lines: the instruction of each."""

    observations: Floats
    chunks: Floats
    done: Flags
    counted: Flags
    lines: list[str]


def seen(state: State) -> Floats:
    """The whole table as numbers, [n, 9]: "agent_pos" and "environment_state" of `MiniTable` in one."""
    holding = (state.held >= 0)[:, None].astype(np.float32)
    return np.concatenate([state.gripper, holding, state.discs.reshape(-1, 6)], 1)


def table_of(numbers: Floats) -> State:
    """The tables of `seen` [n, 9], without their instructions; a disc that is held is the nearest to the gripper."""
    gripper, discs = numbers[:, :2], numbers[:, 3:].reshape(-1, 3, 2)
    nearest = np.linalg.norm(discs - gripper[:, None], axis=-1).argmin(1)
    held = np.where(numbers[:, 2] > 0, nearest, -1)
    return State(gripper, discs, held, np.zeros(len(held), dtype=np.int64))


def play(tables: int, steps: int, *, seed: int, noise: float = 0.3) -> Play:
    """A clumsy player on `tables` tables for `steps` actions, a function of the seed.

    It follows one `PUT` goal after the other, or, one time in three, wanders to a zone or anywhere with an open hand;
    changes its mind now and then, moves with Gaussian noise and lets go, or grasps, by mistake in one action of twenty,
    and closes its hand too early in one of three where a disc is near: what a missed grasp is like must be seen to be
    foretold. There are no instructions, rewards or ends in what it leaves behind.
    """
    rng = np.random.default_rng([seed, 0x91A7])
    state = task.initial_state(task.episode_keys(seed, np.arange(tables), np.zeros(tables)), PUT)
    wanders = np.zeros(tables, dtype=np.bool_)
    aim = np.zeros((tables, 2), dtype=np.float32)
    observations, actions = [seen(state)], []
    for _ in range(steps):
        there = wanders & (np.linalg.norm(aim - state.gripper, axis=1) < task.REACH)
        bored = np.where(wanders, there, task.is_success(state)) | (rng.random(tables) < 0.03)
        state = state._replace(task=np.where(bored, rng.integers(len(PUT), size=tables), state.task))
        wanders = np.where(bored, rng.random(tables) < 1 / 3, wanders)
        near_zone = task.ZONE_CENTRES[rng.integers(3, size=tables)] + rng.normal(0.0, 0.1, (tables, 2))
        anywhere = rng.uniform(-1.0, 1.0, (tables, 2))
        drawn = np.where(rng.random((tables, 1)) < 0.5, near_zone, anywhere)
        aim = np.where(bored[:, None], drawn, aim).astype(np.float32)
        action = task.expert(state)
        way = aim - state.gripper
        stroll = np.concatenate(
            [way / np.maximum(np.abs(way).max(1, keepdims=True), task.REACH), -np.ones((tables, 1))], 1
        )
        action = np.where(wanders[:, None], stroll, action).astype(np.float32)
        action[:, :2] += rng.normal(0.0, noise, (tables, 2)).astype(np.float32)
        near = np.linalg.norm(state.discs - state.gripper[:, None], axis=-1).min(1) < 0.35
        early = near & (state.held < 0) & (rng.random(tables) < 1 / 3)
        action[:, 2] = np.where(early, 1.0, action[:, 2]) * np.where(rng.random(tables) < 0.05, -1.0, 1.0)
        action = np.clip(action, -1.0, 1.0)
        state = task.step(state, action)
        observations.append(seen(state))
        actions.append(action)
    return Play(np.stack(observations, 1), np.stack(actions, 1))


def walk(keys: Keys, tasks: Sequence[int], *, horizon: int, still: int) -> Walk:
    """The expert's episodes, `still` more steps after each success; all go on until the last one is over."""
    state = task.initial_state(keys, tasks)
    lines, after = [INSTRUCTIONS[number] for number in state.task], np.zeros(len(keys), dtype=np.int64)
    observations, chunks, dones, counted = [seen(state)], [], [], []
    while (after <= still).any():
        chunks.append(task.expert_chunk(state, horizon))
        dones.append(task.is_success(state))
        counted.append(after <= still)
        after += dones[-1]
        state = task.step(state, chunks[-1][:, 0])
        observations.append(seen(state))
    columns = (np.stack(column, 1) for column in (observations, chunks, dones, counted))
    return Walk(*columns, lines)
