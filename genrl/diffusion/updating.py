"""The optimiser steps of methods that train each sample at several noise levels or steps of its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from torch import Tensor

from genrl.diffusion.config.schema import Updating
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Loss, Meter, Results, descend

Tensors = dict[str, Tensor]


def update(
    run: DiffusionRun,
    settings: Updating,
    rollouts: Rollouts,
    num_draws: int,
    prepare: Callable[[MicroBatch, int, int], tuple[Batch, Tensors] | None],
    loss: Loss,
    meter: Meter,
    count: Callable[[list[int]], int] | None = None,
) -> None:
    """The optimiser steps of one iteration: every micro-batch at `num_draws` noise levels or steps, per inner epoch.

    prepare(micro-batch, epoch, draw) gives the conditions and all that the loss is made of; None = nothing to train.
    `counts` among it is the weight of every metric, along its last dimension or [] for all: 0 = evaluated with the
    other processes, but in no metric. loss: the method's.
    count(slots): losses that the samples of an update have, over all draws and processes; None: each at every draw.
    """

    def recorded_of(part: tuple[MicroBatch, int, int]) -> Recorded | None:
        prepared = prepare(*part)
        return None if prepared is None else Recorded(*prepared)

    def measure(part: object, results: Results, recorded: Recorded) -> None:
        meter.add_all(results, recorded["counts"] if "counts" in recorded else None)

    run.start_training(settings.epochs * num_draws * len(rollouts.mine))
    for epoch in range(settings.epochs):
        for micro_batches, slots in rollouts.updates(settings.updates):
            divisor = len(slots) * num_draws if count is None else count(slots)
            parts = product(micro_batches, [epoch], range(num_draws if divisor else 0))
            norms = descend(run.loop, settings, run.policy, parts, recorded_of, loss, divisor=divisor, measure=measure)
            meter.note({"grad_norm": norms["policy"]})
