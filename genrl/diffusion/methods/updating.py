"""Optimiser steps of methods whose loss is computed one micro-batch at a time, each at some noise levels or steps.

A method is what it makes of a micro-batch (`prepare`) and its `loss`: see diffusion_nft, awm, dgpo, crd and dpo, which
noise finished samples, d3po and spo, which compare recorded steps, and sft.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from genrl.diffusion.config.schema import Updating
from genrl.diffusion.methods.metering import Meter
from genrl.diffusion.methods.steps import Tensors
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.runtime.loop.recorded import Recorded

Loss = Callable[[Any, Policy, Recorded], Tensors]
"""(settings, policy, what was recorded) -> "loss" [B], metrics by name, and the model's output."""


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
    run.start_training(settings.epochs * num_draws * len(rollouts.mine))
    for epoch in range(settings.epochs):
        for micro_batches, slots in rollouts.updates(settings.updates):
            divisor = len(slots) * num_draws if count is None else count(slots)
            for micro_batch, k in product(micro_batches, range(num_draws if divisor else 0)):
                with run.loop.fitting():
                    found = prepare(micro_batch, epoch, k)
                    if found is None:
                        continue
                    recorded = Recorded(*found)
                    results = loss(settings, run.policy, recorded)
                    run.backward(settings, results, recorded, divisor=divisor)
                meter.add_all(results, recorded["counts"] if "counts" in recorded else None)
            meter.add("grad_norm", torch.tensor([run.step()]))
