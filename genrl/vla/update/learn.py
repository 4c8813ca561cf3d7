"""The learning half of an iteration: epochs of minibatches of decisions, with the clipped surrogate and a critic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.mdp.noise import generator
from genrl.vla.rollout.rollout import ChunkRollout
from genrl.vla.rollout.sampling import Acting
from genrl.vla.run import VLARun
from genrl.vla.update.inner import Loss, gradients
from genrl.vla.update.scores import Decisions, recorded_decisions
from genrl.vla.update.settings import Update


class Minibatch(NamedTuple):
    """mine int64 [n]: which of this process's decisions; total: how many there are over all processes; most: the n of
    the process that has most of them."""

    mine: Tensor
    total: int
    most: int


def minibatches(counts: Sequence[int], process: int, size: int, *keys: int | str) -> Iterator[Minibatch]:
    """One pass over all decisions in parts of about `size`, in an order that the keys decide.

    counts: decisions of each process. The parts differ by one decision at most, so that none is a small remainder; a
    process may have nothing of a part. Without decisions there is no part.
    """
    total = sum(counts)
    if total == 0:
        return
    ends = torch.tensor(counts).cumsum(0)
    order = torch.randperm(total, generator=generator(*keys))
    for part in order.tensor_split(max(1, round(total / size))):
        owner = torch.bucketize(part, ends, right=True)
        own = part[owner == process] - sum(counts[:process])
        yield Minibatch(own, len(part), int(owner.bincount().max()))


PER_RATIO = ("loss/policy", "ratio/mean", "ratio/clipped", "kl/updates")
"""Figures that are means over ratios; the others are over decisions."""


@dataclass
class Figures:
    """Means over the updates of an iteration, each of which is a mean over its decisions."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, found: dict[str, float]) -> None:
        for name, value in found.items():
            self.values[name].append(value)

    @property
    def means(self) -> dict[str, float]:
        return {name: sum(found) / len(found) for name, found in self.values.items()}


def learn(
    run: VLARun,
    rollout: ChunkRollout,
    chosen: Decisions,
    settings: Update,
    figures: Figures,
    loss: Loss,
    *,
    policy: bool,
    critic: bool,
) -> None:
    """Train on these decisions: the policy, the critic, or both, until the epochs are over or `kl_stop` is passed.

    All is divided by the decisions of a minibatch over all processes, so gradients do not depend on their number.
    """
    loop = run.loop
    groups = [name for name, used in (("policy", policy), ("critic", critic)) if used]
    loop.phase("training", settings.epochs * len(chosen.row))
    with loop.timed("train"):
        for epoch in range(settings.epochs):
            # the order is one of all processes' decisions, so it does not depend on how many there are
            counts = gather_object([len(chosen.row)])
            keys = (run.config.seed, "minibatches", loop.iteration, epoch)
            for batch in minibatches(counts, loop.process.accelerator.process_index, settings.minibatch, *keys):
                if not update(run, rollout, chosen, batch, settings, figures, loss, groups):
                    return


def update(
    run: VLARun,
    rollout: ChunkRollout,
    chosen: Decisions,
    batch: Minibatch,
    settings: Update,
    figures: Figures,
    loss: Loss,
    groups: list[str],
) -> bool:
    """One optimiser step on this process's decisions of a minibatch; False where the policy has moved so far that the
    iteration's updates end before it.

    All processes make as many passes, as each of them ends with one word to the others.
    """
    mine, acting = chosen.chosen(batch.mine), Acting(run.policy, rollout.sampler)
    policy, critic = "policy" in groups, "critic" in groups
    record = partial(recorded_decisions, rollout, total=batch.total, policy=policy, critic=critic)
    passes = math.ceil(batch.most / (settings.microbatch or batch.most))
    parts = torch.arange(len(mine.row)).tensor_split(passes)
    records = ((len(part), partial(record, mine.chosen(part))) for part in parts)
    sums = gradients(run, settings, loss, acting, records, idle=partial(record, chosen.idle()))
    # all processes name the same figures, also one that had no decision
    names = [*PER_RATIO, *["loss/value"] * critic, *["entropy"] * (settings.entropy_weight > 0), "number"]
    summed = run.summed({name: sums.get(name, torch.zeros(())) for name in names})
    number = max(1.0, summed.pop("number"))
    means = {name: value / (number if name in PER_RATIO else batch.total) for name, value in summed.items()}
    if "policy" in groups:
        figures.add(means)
        if settings.kl_stop is not None and means["kl/updates"] > settings.kl_stop:
            run.loop.optimizer.zero_grad(set_to_none=True)
            return False
    else:
        figures.add({"loss/value": means["loss/value"]})
    norms = run.loop.step(groups)
    figures.add({f"grad_norm/{name}": norm for name, norm in norms.items()})
    return True
