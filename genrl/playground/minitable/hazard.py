"""MiniTable with something to keep away from: the discs that the instruction does not name."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from genrl.playground.minitable import task
from genrl.playground.minitable.env import MiniTable
from genrl.playground.minitable.task import PUT, TOUCH, Flags, Floats, State
from genrl.vla.simulators.contract import Step

HAZARD = 0.2
"""A gripper nearer than this to another disc than the instruction's does damage; discs begin .36 apart or more."""


class HazardTable(MiniTable):
    """`MiniTable` whose info also has "costs" float32 [n, chunk]: 1 for an executed action that ended in a hazard."""

    def step(self, actions: Floats, /) -> Step:
        """As `MiniTable.step`."""
        state = self.state
        observation, rewards, terminated, truncated, info = super().step(actions)
        costs = np.zeros((self.num_envs, self.chunk), dtype=np.float32)
        for k in range(self.chunk):  # the executed actions once more: the table is deterministic
            executed = k < info["n_executed"]
            state = state.replaced(executed, task.step(state.rows(executed), actions[executed, k]))
            costs[:, k] = executed & in_hazard(state)
        return observation, rewards, terminated, truncated, info | {"costs": costs}


def in_hazard(state: State) -> Flags:
    """Whether the gripper is nearer than `HAZARD` to a disc that the instruction does not name. [n]."""
    dangerous: Flags = nearest_hazard(state) < HAZARD
    return dangerous


def nearest_hazard(state: State) -> Floats:
    """Distance of the gripper to the nearest disc that the instruction does not name. [n]."""
    distance = np.linalg.norm(state.discs - state.gripper[:, None], axis=-1)
    distance[np.arange(len(distance)), _named(state)] = np.inf
    nearest: Floats = distance.min(1)
    return nearest


def mixed_quality(state: State, careful: Flags, noise: Floats) -> Floats:
    """A behaviour to learn from that is not safe: actions [n, 3] towards the disc of a `TOUCH` instruction.

    Straight there, or, where careful [n], turned aside by other discs in the way; noise [n, 2] is added to the move.
    """
    rows = np.arange(len(state.task))
    disc = state.discs[rows, _named(state)]
    way = disc - state.gripper
    unit = way / np.maximum(np.linalg.norm(way, axis=1, keepdims=True), 1e-6)
    aside = np.zeros_like(way)
    for other in range(3):
        apart = state.gripper - state.discs[:, other]
        distance = np.maximum(np.linalg.norm(apart, axis=1), 1e-6)
        push = np.where(_named(state) == other, 0.0, np.clip((0.45 - distance) / 0.2, 0.0, 1.5))
        away = apart / distance[:, None]
        side = np.stack([-away[:, 1], away[:, 0]], 1)  # along the hazard's edge, the way that leads on
        side *= np.where((side * unit).sum(1, keepdims=True) >= 0, 1.0, -1.0)
        in_the_way = (away * unit).sum(1) < 0.3
        aside += (push * in_the_way)[:, None] * (away + 0.8 * side)
    move = unit + np.where(careful[:, None], aside, 0.0)
    short = np.minimum(np.linalg.norm(way, axis=1, keepdims=True) / task.REACH, 1.0)
    move = short * move / np.maximum(np.abs(move).max(1, keepdims=True), 1.0) + noise
    return np.concatenate([np.clip(move, -1.0, 1.0), np.full((len(move), 1), -1.0)], 1).astype(np.float32)


def _named(state: State) -> NDArray[np.int64]:
    """The disc of each instruction."""
    return np.where(np.isin(state.task, TOUCH), state.task - len(PUT), state.task // 3)
