"""The one inner loop of pipelines, and the meter of what came of it.

A method is what it makes of a part of the iteration (`prepare`) and its `loss`; `descend` does what all have in common.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.config.method import Method
from genrl.diffusion.config.schema import Updating
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.objectives.advantages.groups import GroupStatistics
from genrl.objectives.surrogates.policy_losses import SurrogateOutput
from genrl.runtime.loop.recorded import Recorded

Tensors = dict[str, Tensor]
Loss = Callable[[Any, Policy, Recorded], Tensors]
"""(settings, policy, what was recorded) -> "loss" [B], metrics by name, and the model's output."""
EVIDENCE = ("model_output", "log_prob", "mean", "std")
"""What losses return for dumps and no metric."""


class Meter:
    """Collects per-sample values; `result` is their mean (`*/std`: standard deviation, `*/max_abs_dev`: maximum).

    Values may have weights, then the mean is the weighted one.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = defaultdict(list)
        self._weights: dict[str, list[Tensor]] = defaultdict(list)
        self._same: dict[str, float] = {}

    def add(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Values [any] of this process, with weights of the same shape; None = 1 each, 0 = not counted."""
        kept = values.detach().flatten().double().cpu()
        weight = torch.ones_like(kept) if weights is None else weights.detach().flatten().double().cpu()
        counted = weight > 0
        self._values[name].append(kept[counted])
        self._weights[name].append(weight[counted])

    def add_all(self, results: Mapping[str, Tensor], weight: Tensor | None = None) -> None:
        """What a loss found, by name, without what it keeps for dumps alone (`EVIDENCE`). weight: along the last
        dimension, or [] of all."""
        for name, values in results.items():
            if name not in EVIDENCE:
                self.add(name, values, None if weight is None else weight.expand_as(values))

    def add_groups(self, statistics: GroupStatistics, advantages: Tensor, clip: float) -> None:
        """What all processes know alike."""
        self.add_spread(statistics)
        self.add_advantages(advantages, clip)

    def add_spread(self, statistics: GroupStatistics) -> None:
        self._same |= {"zero_std_ratio": statistics.zero_std_ratio, "group_std_mean": statistics.mean_std}

    def add_advantages(self, advantages: Tensor, clip: float) -> None:
        trained = advantages[advantages != 0]
        self._same |= {
            "advantage/abs_mean": float(trained.abs().mean()) if len(trained) else 0.0,
            "advantage/clipped": float((trained.abs() >= clip).double().mean()) if len(trained) else 0.0,
        }

    def add_surrogate(self, surrogate: SurrogateOutput, advantage: Tensor, weight: Tensor | None = None) -> None:
        """weight: of each transition in the loss; those of 0 are not trained and not counted."""
        ratio = surrogate.ratio
        trained = None if weight is None else weight > 0
        self.add("loss/policy", surrogate.loss, weight)
        self.add("ratio/mean", ratio, trained)
        self.add("ratio/std", ratio - 1.0, trained)  # about 1, where squares would lose what distinguishes ratios
        self.add("ratio/max_abs_dev", (ratio - 1.0).abs(), trained)
        self.add("clip_frac_high", surrogate.clipped & (advantage > 0), trained)
        self.add("clip_frac_low", surrogate.clipped & (advantage < 0), trained)

    def result(self) -> dict[str, float]:
        """Name -> value over all processes; the same on each."""
        summed = {}
        for name, values in self._values.items():
            v, w = torch.cat(values), torch.cat(self._weights[name])
            if len(v):
                squares = float((w * v.square()).sum())
                summed[name] = (float((w * v).sum()), float(w.sum()), float(v.max()), squares)
        everyone: list[dict[str, tuple[float, float, float, float]]] = gather_object([summed])
        found = dict(self._same)
        for name in sorted({name for one in everyone for name in one}):
            pieces = [one[name] for one in everyone if name in one]
            count = sum(p[1] for p in pieces)
            mean = math.fsum(p[0] for p in pieces) / count
            if name.endswith("/max_abs_dev"):
                found[name] = max(p[2] for p in pieces)
            elif name.endswith("/std"):
                found[name] = math.sqrt(max(0.0, math.fsum(p[3] for p in pieces) / count - mean**2))
            else:
                found[name] = mean
        return found


def descend(
    run: DiffusionRun,
    settings: Method,
    parts: Iterable[tuple[Any, ...]],
    prepare: Callable[..., Recorded | None],
    loss: Loss,
    meter: Meter,
    *,
    divisor: float,
    measure: Callable[..., None] | None = None,
) -> None:
    """One optimiser step on these parts of an iteration, by the gradient of the sum of their losses over `divisor`.

    prepare(*part): all that the loss reads; None = nothing to train. measure(results, recorded, *part): is told what
    came of each.
    """
    share = run.config.sampling.images_per_iteration / run.passes
    for part in parts:
        # Memory may run out in any of the three: the iteration is then done again in smaller micro-batches.
        with run.loop.fitting():
            recorded = prepare(*part)
            if recorded is None:
                continue
            results = loss(settings, run.policy, recorded)
            run.loop.backward(settings, results, recorded, divisor=divisor)
        run.loop.advance(share)
        if measure is not None:
            measure(results, recorded, *part)
    # Processes without a part step too: gradients are summed over all of them.
    meter.add("grad_norm", torch.tensor([run.loop.step()["policy"]]))


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

    def recorded_of(micro_batch: MicroBatch, epoch: int, k: int) -> Recorded | None:
        prepared = prepare(micro_batch, epoch, k)
        return None if prepared is None else Recorded(*prepared)

    def measure(results: Tensors, recorded: Recorded, *part: object) -> None:
        meter.add_all(results, recorded["counts"] if "counts" in recorded else None)

    run.start_training(settings.epochs * num_draws * len(rollouts.mine))
    for epoch in range(settings.epochs):
        for micro_batches, slots in rollouts.updates(settings.updates):
            divisor = len(slots) * num_draws if count is None else count(slots)
            parts = product(micro_batches, [epoch], range(num_draws if divisor else 0))
            descend(run, settings, parts, recorded_of, loss, meter, divisor=divisor, measure=measure)
