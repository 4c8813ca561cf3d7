"""Demonstrations of MiniTable's expert: episodes, a data set, or frames to imitate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.playground import minitable
from genrl.playground.minitable import task
from genrl.playground.minitable.env import cloud
from genrl.vla.data.frames import Shown
from genrl.vla.data.lerobot_dataset import Dataset, Episode, write_dataset
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, POINTS, STATE

MINITABLE_FPS = 10
_NAMES = {
    STATE: ["x", "y", "holding"],
    ENVIRONMENT: [f"{colour}_{axis}" for colour in task.COLOURS for axis in "xy"],
    ACTION: ["dx", "dy", "grip"],
}


def minitable_expert(
    tasks: Sequence[str], count: int, *, seed: int, max_steps: int | None, image_size: int, points: int
) -> Shown:
    """`count` episodes of all tasks together, each of which takes fewer actions than any limit that makes sense."""
    numbers = task.task_numbers(tasks)
    demonstrations = expert_demonstrations(count, tasks=numbers, seed=seed)
    texts = [minitable.INSTRUCTIONS[number] for number in numbers]
    episodes = minitable_episodes(demonstrations, image_size=image_size, points=points)
    return Shown(texts, episodes, minitable_rest)


def minitable_rest(actions: NDArray[np.float32]) -> Sequence[float]:
    """What MiniTable's expert does once it has succeeded: nothing, with the gripper open."""
    return (0.0, 0.0, -1.0)


def expert_demonstrations(count: int, *, tasks: Sequence[int], seed: int) -> minitable.Demonstrations:
    """`count` episodes of MiniTable's expert: a function of the seed, and of no environment's episodes."""
    keys = task.episode_keys(seed, np.arange(count), np.zeros(count))
    return minitable.demonstrate(keys, tasks)


def minitable_episodes(
    demonstrations: minitable.Demonstrations, *, image_size: int, points: int = 0
) -> Iterator[Episode]:
    """The demonstrations as episodes with LeRobot's columns; pictures of image_size pixels, clouds of so many
    points, none where they are 0.

    `STATE` [T, 3], `ENVIRONMENT` [T, 6], `IMAGE` uint8 [T, S, S, 3], `POINTS` [T, N, 3], `ACTION` [T, 3], and of the
    step that follows a frame `next.reward` float32, `next.done` and `next.success` bool [T, 1]: 1 and true at the last
    one.
    """
    d = demonstrations
    for number, length in enumerate(d.length):
        state = minitable.State(
            d.gripper[number, :length], d.discs[number, :length], d.held[number, :length], d.task[[number] * length]
        )
        last = (np.arange(length) == length - 1)[:, None]
        columns: dict[str, NDArray[Any]] = {
            STATE: np.concatenate([state.gripper, (state.held >= 0)[:, None].astype(np.float32)], 1),
            ENVIRONMENT: state.discs.reshape(-1, 6),
            ACTION: d.actions[number, :length],
            "next.reward": last.astype(np.float32),
            "next.done": last,
            "next.success": last,
        }
        if image_size:
            columns[IMAGE] = minitable.render(state, image_size)
        if points:
            columns[POINTS] = cloud(state, points)
        yield Episode([minitable.INSTRUCTIONS[d.task[number]]] * length, columns)


def write_minitable(
    folder: Path, demonstrations: minitable.Demonstrations, *, image_size: int, videos: bool = False
) -> Dataset:
    """The demonstrations as a LeRobotDataset in a new folder; see `write_dataset`."""
    episodes = minitable_episodes(demonstrations, image_size=image_size)
    return write_dataset(folder, episodes, fps=MINITABLE_FPS, names=_NAMES, robot_type="minitable", videos=videos)
