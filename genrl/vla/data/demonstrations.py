"""Demonstrations as data sets, and data sets as the frames of supervised training (`imitation`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrl.vla.data.lerobot_dataset import Dataset, Episode, write_dataset
from genrl.vla.methods.imitation import ACTION_IS_PAD
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE, TOKENS, Batch
from genrl.vla.simulators import minitable
from genrl.vla.simulators.minitable import task

MINITABLE_REST = (0.0, 0.0, -1.0)
"""What MiniTable's expert does once it has succeeded: nothing, with the gripper open."""
MINITABLE_FPS = 10
_NAMES = {
    STATE: ["x", "y", "holding"],
    ENVIRONMENT: [f"{colour}_{axis}" for colour in task.COLOURS for axis in "xy"],
    ACTION: ["dx", "dy", "grip"],
}


def expert_demonstrations(count: int, *, tasks: Sequence[int], seed: int) -> minitable.Demonstrations:
    """`count` episodes of MiniTable's expert: a function of the seed, and of no environment's episodes."""
    keys = task.episode_keys(seed, np.arange(count), np.zeros(count))
    return minitable.demonstrate(keys, tasks)


def minitable_episodes(demonstrations: minitable.Demonstrations, *, image_size: int) -> Iterator[Episode]:
    """The demonstrations as episodes with LeRobot's columns; pictures of image_size pixels, none where it is 0.

    `STATE` [T, 3], `ENVIRONMENT` [T, 6], `IMAGE` uint8 [T, S, S, 3], `ACTION` [T, 3], and of the step that follows a
    frame `next.reward` float32, `next.done` and `next.success` bool [T, 1]: 1 and true at the last frame.
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
        yield Episode([minitable.INSTRUCTIONS[d.task[number]]] * length, columns)


def write_minitable(
    folder: Path, demonstrations: minitable.Demonstrations, *, image_size: int, videos: bool = False
) -> Dataset:
    """The demonstrations as a LeRobotDataset in a new folder; see `write_dataset`."""
    episodes = minitable_episodes(demonstrations, image_size=image_size)
    return write_dataset(folder, episodes, fps=MINITABLE_FPS, names=_NAMES, robot_type="minitable", videos=videos)


def dataset_frames(
    dataset: Dataset,
    tokenise: Callable[[Sequence[str]], Tensor],
    *,
    inputs: Sequence[str],
    horizon: int,
    rest: Sequence[float] | None = None,
    episodes: Iterable[int] | None = None,
) -> Batch:
    """Every frame of a data set as an observation and the chunk of actions from there, F rows, episode after episode.

    inputs: what the policy reads; `TOKENS` is made by `tokenise`, the others are columns. Numbers become float32
    [F, D], pictures stay uint8 [F, H, W, 3]. `ACTION` float32 [F, horizon, A]. Beyond the end of its episode a chunk
    repeats the last action, and `ACTION_IS_PAD` bool [F, horizon] says so (LeRobot's delta_timestamps); with rest [A],
    the action that stands still, it goes on with that as if it had been demonstrated, and there is no mask.

    All of it is in memory: F H W 3 bytes for each camera. Raises as `Dataset.read`, and ValueError for a rest of
    another width.
    """
    columns = [name for name in inputs if name != TOKENS]
    found: dict[str, list[NDArray[Any]]] = {name: [] for name in (*columns, ACTION, ACTION_IS_PAD)}
    instructions: list[str] = []
    for episode in dataset.read([*columns, ACTION], episodes):
        for name in columns:
            found[name].append(episode.columns[name])
        actions, beyond = chunks(episode.columns[ACTION].astype(np.float32), horizon, rest)
        found[ACTION].append(actions)
        found[ACTION_IS_PAD].append(beyond)
        instructions += episode.instructions
    if rest is not None:
        del found[ACTION_IS_PAD]
    frames = {name: _tensor(np.concatenate(found.pop(name))) for name in list(found)}
    if TOKENS in inputs:
        texts = list(dict.fromkeys(instructions))
        number = {text: place for place, text in enumerate(texts)}
        frames[TOKENS] = tokenise(texts)[torch.tensor([number[text] for text in instructions])]
    return frames


def chunks(
    actions: NDArray[np.float32], horizon: int, rest: Sequence[float] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The `horizon` actions from each of T frames, [T, horizon, A], and which lie beyond the last one, [T, horizon].

    actions [T, A]; those beyond are the last one, or rest [A].
    """
    place = np.arange(len(actions))[:, None] + np.arange(horizon)
    beyond = place >= len(actions)
    found = actions[np.minimum(place, len(actions) - 1)]
    if rest is not None:
        if len(rest) != actions.shape[1]:
            raise ValueError(f"rest has {len(rest)} numbers, the actions of the data set {actions.shape[1]}")
        found[beyond] = np.asarray(rest, dtype=np.float32)
    return found, beyond


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values if values.dtype in (np.uint8, np.bool_) else values.astype(np.float32))
