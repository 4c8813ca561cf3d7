"""Episodes as the frames of supervised training (`imitation`): observations with the chunks of actions from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrl.vla.data.lerobot_dataset import Dataset, Episode
from genrl.vla.policies.normalise import statistics, with_least_spread
from genrl.vla.policies.policy import ACTION, TOKENS, Batch, Statistics

STD_FLOOR = 0.02
"""Least std of a state: one that hardly moves in few demonstrations must not be blown up when it does."""
ACTION_IS_PAD = "action_is_pad"
"""Frames may have it, bool [F, H]: actions beyond the end of an episode, which are not imitated (LeRobot's name)."""

Rest = Callable[[NDArray[np.float32]], Sequence[float]]
"""Of an episode's actions [T, A], the action [A] that stands still after them."""


class Shown(NamedTuple):
    """Demonstrations: their instructions, their episodes with the columns asked for, and what comes after their end."""

    texts: Sequence[str]
    episodes: Iterable[Episode]
    rest: Rest | None


def episode_frames(
    episodes: Iterable[Episode],
    tokenise: Callable[[Sequence[str]], Tensor],
    *,
    inputs: Sequence[str],
    horizon: int,
    rest: Rest | None = None,
) -> Batch:
    """Every frame of some episodes as an observation and the chunk of actions from there, F rows, one after the other.

    inputs: what the policy reads; `TOKENS` is made by `tokenise`, the others are columns. Numbers become float32
    [F, D], pictures stay uint8 [F, H, W, 3]. `ACTION` float32 [F, horizon, A]. Beyond the end of its episode a chunk
    repeats the last action, and `ACTION_IS_PAD` bool [F, horizon] says so (LeRobot's delta_timestamps); with rest, the
    action that stands still, it goes on with that as if it had been demonstrated, and there is no mask.

    All of it is in memory: F H W 3 bytes for each camera. Raises ValueError for a rest of another width.
    """
    columns = [name for name in inputs if name != TOKENS]
    columns_of: dict[str, list[NDArray[Any]]] = {name: [] for name in (*columns, ACTION, ACTION_IS_PAD)}
    instructions: list[str] = []
    for episode in episodes:
        for name in columns:
            columns_of[name].append(episode.columns[name])
        own = episode.columns[ACTION].astype(np.float32)
        actions, beyond = chunks(own, horizon, None if rest is None else rest(own))
        columns_of[ACTION].append(actions)
        columns_of[ACTION_IS_PAD].append(beyond)
        instructions += episode.instructions
    if rest is not None:
        del columns_of[ACTION_IS_PAD]
    # Popped one by one, so that pictures are in memory twice only a column at a time.
    frames = {name: _tensor(np.concatenate(columns_of.pop(name))) for name in list(columns_of)}
    if TOKENS in inputs:
        # A tokenizer reads each sentence once, not once for every frame.
        texts = list(dict.fromkeys(instructions))
        number = {text: place for place, text in enumerate(texts)}
        frames[TOKENS] = tokenise(texts)[torch.tensor([number[text] for text in instructions])]
    return frames


def dataset_frames(
    dataset: Dataset,
    tokenise: Callable[[Sequence[str]], Tensor],
    *,
    inputs: Sequence[str],
    horizon: int,
    rest: Rest | None = None,
    episodes: Iterable[int] | None = None,
) -> Batch:
    """`episode_frames` of a data set, or of some of its episodes. Raises as `Dataset.read`, too."""
    columns = [name for name in inputs if name != TOKENS]
    dataset_episodes = dataset.read([*columns, ACTION], episodes)
    return episode_frames(dataset_episodes, tokenise, inputs=inputs, horizon=horizon, rest=rest)


def chunks(
    actions: NDArray[np.float32], horizon: int, rest: Sequence[float] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The `horizon` actions from each of T frames, [T, horizon, A], and which lie beyond the last one, [T, horizon].

    actions [T, A]; those beyond are the last one, or rest [A].
    """
    place = np.arange(len(actions))[:, None] + np.arange(horizon)
    beyond = place >= len(actions)
    chunk = actions[np.minimum(place, len(actions) - 1)]
    if rest is not None:
        if len(rest) != actions.shape[1]:
            raise ValueError(f"rest has {len(rest)} numbers, the actions of the data set {actions.shape[1]}")
        chunk[beyond] = np.asarray(rest, dtype=np.float32)
    return chunk, beyond


def frame_statistics(frames: Batch) -> Statistics:
    """`normalise.statistics` of every float entry of some frames; the std of states is `STD_FLOOR` at least."""
    stats = {name: with_least_spread(statistics(value)) for name, value in frames.items() if value.is_floating_point()}
    for name in stats.keys() - {ACTION}:
        stats[name]["std"] = stats[name]["std"].clamp(min=STD_FLOOR)
    return stats


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values if values.dtype in (np.uint8, np.bool_) else values.astype(np.float32))
