"""Whether demonstrations lie where a policy's statistics expect them: what is normalised must be about one in size."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from genrl.runtime.folder.hub import local_folder
from genrl.vla.config.files import is_recording
from genrl.vla.data.lerobot_dataset import open_dataset
from genrl.vla.policies.encoder import MODES
from genrl.vla.policies.normalise import normalise, statistics, with_least_spread
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE, Batch, Policy, Statistics

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig

logger = logging.getLogger(__name__)

OUTSIDE = 5.0
"""A normalised number beyond it is outside: bounds are at 1, and of normal numbers one in two million is."""
LARGEST = 1000.0
"""One beyond it makes the loss its own square: no training comes of that."""


def data_statistics(config: VLAConfig) -> Statistics:
    """Statistics of `demonstrations.dataset` by the policy's names; ValueError where it is no data set of LeRobot's."""
    source = config.demonstrations
    if source is None or source.dataset is None or is_recording(Path(source.dataset)):
        raise ValueError("policy.statistics: data are those of a LeRobot data set; name it in demonstrations.dataset")
    dataset = open_dataset(local_folder(source.dataset, "dataset"))
    pictures = {name: dataset.stats[name] for name in dataset.cameras}
    numbers = [name for name in (STATE, ENVIRONMENT, ACTION) if name in dataset.features]
    columns: dict[str, list[Any]] = {name: [] for name in numbers}
    for episode in dataset.read(numbers):
        for name in numbers:
            columns[name].append(episode.columns[name])
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
