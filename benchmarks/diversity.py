"""How much the pictures of one prompt differ, before and after a run."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from benchmarks.common import opened
from genrl.config import load
from genrl.config.method import code_of
from genrl.diffusion.rollout.scoring import plain
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run

PROMPTS, PICTURES = 24, 4
"""The first held-out ones, and how many pictures of each."""


def distance(images: Tensor) -> float:
    """Mean over the pairs of pictures [G, ...] of the root mean square difference of their pixels, in [0, 1]."""
    flat = images.flatten(1).double()
    return float(torch.pdist(flat).mean()) / flat.shape[1] ** 0.5


def diversity(images: Tensor, group: list[int]) -> list[float]:
    """A reward: `distance` of a group, for each of its pictures. An evaluation asks for one group at a time."""
    assert len(set(group)) == 1
    return [distance(images)] * len(group)


def measure(run: Run, evaluation: str) -> list[float]:
    """Mean `distance` of a prompt's pictures by the model before training, and by the newest checkpoint.

    The pictures are those of the run's own evaluation, for fewer prompts and each from its own fixed noise.
    evaluation: where the figures stand in the log (`eval`, `eval_rewritten`). Raises ValueError without a checkpoint of
    the last iteration.
    """
    config = load(run.config, [f"evaluation.num_prompts={PROMPTS}", f"evaluation.group_size={PICTURES}"])
    last, distances = checkpoint.latest(run.checkpoints), []
    for saved in (None, last):
        with ExitStack() as stack:
            again = opened(config, stack)
            if saved is not None:
                again.loop.restore(saved)
            if saved is last and again.loop.iteration < config.iterations:
                raise ValueError(f"{run.folder} has no checkpoint of iteration {config.iterations}")
            again.loop.iteration = config.iterations  # so that the method gets ready, and has nothing to train
            code_of(config.trainer).train(again, config.trainer)
            again.held_out.scorers = plain({"diversity": diversity})
            with again.loop.averaged():
                distances.append(round(again.evaluate(config.iterations)[f"{evaluation}/diversity_mean"], 5))
    return distances
