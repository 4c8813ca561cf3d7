"""Episodes as the frames of supervised training (`imitation`): observations with the chunks of actions from there.

Whether demonstrations lie where a policy's statistics expect them: what is normalised must be about one in size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrl.runtime.folder.hub import local_folder
from genrl.vla.config.files import is_recording
from genrl.vla.data.lerobot_dataset import Dataset, Episode, open_dataset
from genrl.vla.data.lerobot_dataset.features import STATS
from genrl.vla.policies.encoder import MODES
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE, TOKENS, Batch, Policy, Statistics
from genrl.vla.policies.robot import normalise, statistics, with_least_spread

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig

logger = logging.getLogger(__name__)

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

    All of it is in memory: F H W 3 bytes for each camera. Raises ValueError for a rest of another width, and for a
    column of several shapes.
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
    frames = {name: _tensor(_joined(columns_of.pop(name), name)) for name in list(columns_of)}
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
    """`robot.statistics` of every float entry of some frames; the std of states is `STD_FLOOR` at least."""
    stats = {name: with_least_spread(statistics(value)) for name, value in frames.items() if value.is_floating_point()}
    for name in stats.keys() - {ACTION}:
        stats[name]["std"] = stats[name]["std"].clamp(min=STD_FLOOR)
    return stats


def _joined(values: Sequence[NDArray[Any]], name: str) -> NDArray[Any]:
    """One after the other. Raises ValueError where a frame of one is not of the shape of another's."""
    shapes = sorted({part.shape[1:] for part in values})
    if len(shapes) > 1:
        text = f"{name} is {list(shapes[0])} in one episode and {list(shapes[1])} in another"
        raise ValueError(f"demonstrations: {text}; bring all episodes to one shape")
    return np.concatenate(values)


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values if values.dtype in (np.uint8, np.bool_) else values.astype(np.float32))


OUTSIDE = 5.0
"""A normalised number beyond it is outside: bounds are at 1, and of normal numbers one in two million is."""
LARGEST = 1000.0
"""One beyond it makes the loss its own square: no training comes of that."""


def columns_of_openpi(dataset: Dataset) -> dict[str, str]:
    """Names of columns as openpi has them, by LeRobot's, of a data set that has them in the place of these."""
    names, held = {STATE: "state", ACTION: "actions"}, dataset.features
    return {name: other for name, other in names.items() if name not in held and other in held}


def data_statistics(config: VLAConfig) -> Statistics:
    """Statistics of `demonstrations.dataset` by the policy's names; ValueError where it is no data set of LeRobot's."""
    source = config.demonstrations
    if source is None or source.dataset is None or is_recording(Path(source.dataset)):
        raise ValueError("policy.statistics: data are those of a LeRobot data set; name it in demonstrations.dataset")
    dataset = open_dataset(local_folder(source.dataset, "dataset"))
    # Of pictures alone are those read that are stored: most policies need none of them, and not all data have any.
    held = dataset.stats if (dataset.folder / STATS).is_file() else {}
    pictures = {name: held[name] for name in dataset.cameras if name in held}
    stored = {name: name for name in (STATE, ENVIRONMENT, ACTION) if name in dataset.features}
    stored |= columns_of_openpi(dataset)
    columns: dict[str, list[Any]] = {name: [] for name in stored}
    for episode in dataset.read(list(stored.values())):
        for name, other in stored.items():
            columns[name].append(episode.columns[other])
    read = {name: torch.from_numpy(np.concatenate(value)).float() for name, value in columns.items()}
    stats = {name: with_least_spread(statistics(value)) for name, value in read.items()}
    renamed = {IMAGE if name == source.camera else name: value for name, value in pictures.items()}
    return {config.policy.rename.get(name, name): value for name, value in {**renamed, **stats}.items()}


def normalised(policy: Any, frames: Batch) -> dict[str, Tensor]:
    """The numbers of frames as the policy reads and imitates them, [F, D] by name."""
    robot: Any = getattr(policy, "robot", None)
    values: dict[str, Tensor] = {}
    for name in (STATE, ENVIRONMENT):
        if name in getattr(robot, "vectors", ()) and name in frames:
            values[name] = robot.vector(frames, name, torch.device("cpu"))
        elif robot is None and name in policy.stats and name in frames:
            values[name] = normalise(frames[name].cpu(), policy.stats[name], MODES["STATE" if name == STATE else "ENV"])
    actions = policy.normalised(frames[ACTION][:, :1])  # every action is the first of some chunk
    if actions.is_floating_point():
        values[ACTION] = actions.flatten(0, -2)
    return {name: value.flatten(0, -2) for name, value in values.items()}


def check_spread(policy: Policy, frames: Batch) -> None:
    """A line for every dimension of which something lies far outside of the policy's statistics.

    Raises ValueError where half of a dimension's numbers do, or one is so large that it would be all of the loss: data
    in other units than those that the policy was trained on.
    """
    for name, values in normalised(policy, frames).items():
        sizes = values.abs()
        for place in ((sizes > OUTSIDE).any(0)).nonzero()[:, 0].tolist():
            share, largest = float((sizes[:, place] > OUTSIDE).float().mean()), float(sizes[:, place].max())
            beyond = f"lie beyond {OUTSIDE:g} once normalised, up to {largest:.4g}"
            text = f"{share:.2%} of the numbers of {name}[{place}] {beyond}"
            if share > 0.5 or largest > LARGEST:
                raise ValueError(
                    f"policy.path: the demonstrations do not fit its statistics: {text} (about 1 is expected): "
                    "give them in the units that the policy was trained on, or write policy.statistics: data"
                )
            logger.warning(text)
