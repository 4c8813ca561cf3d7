"""What runs that answer questions and runs of episodes share: how an iteration's answers are shared out, which weights
draw, and what is said and saved at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from genrl.runtime.folder.run import read_metrics
from genrl.runtime.loop.frame import halvings, say_result
from genrl.runtime.loop.loop import Loop
from genrl.runtime.loop.process import Process
from genrl.runtime.loop.versions import Versions
from genrl.vlm.config.schema import Stage, VLMConfig
from genrl.vlm.engines.generation import weights_changed
from genrl.vlm.methods.estimate import Estimate
from genrl.vlm.methods.sharing import Update
from genrl.vlm.policies.folder import load_trained, save_model
from genrl.vlm.policies.policy import Policy
from genrl.vlm.rollout.token_batch import TokenBatch

SEEN = 0.02
"""Accuracy or success with pictures over that without them, below which reinforcement has nothing to work on."""
SAMPLER_GAP = 0.1
"""Mean difference of log-probabilities between sampler and trainer above which something is wrong (spec 6.3)."""


class Estimated(NamedTuple):
    """batch: this process's rows, with advantages and weights, `extra["row"]` their numbers; found: what `estimate`
    says of all of them; updates: how they are shared out."""

    batch: TokenBatch
    found: Estimate
    updates: list[Update]


class Headed(NamedTuple):
    """What a loss is called with where a method trains modules beside the policy."""

    policy: Policy
    heads: Mapping[str, nn.Module]


@contextmanager
def drawing(versions: Versions | None, loop: Loop, policy: Policy) -> Iterator[None]:
    """Context with the weights that draw the running iteration, where these are older than the present ones."""
    if versions is None or not versions.age(loop.iteration):
        yield
        return
    with versions.drawing(loop.weights, loop.iteration):
        weights_changed(policy)
        yield
    weights_changed(policy)


def share_of(process: Process, number: int) -> list[int]:
    """This process's part of 0 to number - 1."""
    parts = np.array_split(np.arange(number), process.accelerator.num_processes)
    numbers: list[int] = parts[process.rank].tolist()
    return numbers


def warn_blind(process: Process, seeing: float, blind: float, what: str) -> None:
    """Say that the model does not see what it is asked, where black pictures do as well."""
    if seeing - blind < SEEN:
        process.progress.say(
            f"warning: {seeing:.3f} of the {what}, {blind:.3f} with black pictures: the model does not go by what it "
            "sees, and reinforcement learning will hardly teach it to"
        )


def pass_sizes(config: VLMConfig, rows: int, *, whole_groups: bool) -> list[int]:
    """Rows per pass of the model, of `rows` that a process has in an update, and the smaller numbers that can be
    taken."""
    size = (config.economy.keep or config.generation.group_size) if whole_groups else 1
    return halvings(config.trainer.rows_per_pass or rows, size)


def resized(config: VLMConfig, size: int) -> VLMConfig:
    """The configuration with so many rows per pass."""

    def smaller(part: VLMConfig | Stage) -> Any:
        own = None if part.trainer is None else part.trainer.model_copy(update={"micro_batch": size})
        return part.model_copy(update={"trainer": own})

    stages = tuple(smaller(stage) for stage in config.stages)
    changed: VLMConfig = smaller(config).model_copy(update={"stages": stages})
    return changed


def save_result(loop: Loop, policy: Policy, metric: str, *, pictures: str) -> None:
    """The model's folder, its average's weights where the run keeps one, and what is said at the end."""
    folder = loop.process.run.folder / "model"
    if loop.weights.is_sharded:  # this process has a share; the checkpoint just written has the whole
        save_model(load_trained(loop.config, loop.process.run.folder), loop.config.vlm.path, folder)
    else:
        with loop.averaged():
            save_model(policy, loop.config.vlm.path, folder)
    rows = read_metrics(loop.process.run.metrics)
    result = f"the model, as transformers saves it: {folder}"
    say_result(loop, rows, metric, label=metric, pictures=pictures, result=result)


def check_gap(gap: float) -> None:
    """Raise RuntimeError where sampler and trainer do not see the same."""
    if not gap <= SAMPLER_GAP:
        raise RuntimeError(
            f"the trainer and the sampler assign different log-probabilities to the same tokens: {gap:.3g} apart on "
            "average before any training. Look for another resizing of pictures, chat template, position ids or "
            "precision."
        )
