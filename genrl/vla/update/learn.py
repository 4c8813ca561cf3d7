"""The learning half of an iteration: epochs of minibatches of decisions, with the clipped surrogate and a critic."""

from __future__ import annotations

import math
from functools import partial

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Dealt, Loss, Meter, Results, deal, descend, summed
from genrl.vla.methods.settings import Update
from genrl.vla.rollout.collect import ChunkRollout
from genrl.vla.rollout.sampling import Acting
from genrl.vla.run import VLARun
from genrl.vla.update.scores import Decisions, recorded_decisions

PER_RATIO = ("loss/policy", "ratio/mean", "ratio/clipped", "kl/updates")
"""Figures that are means over ratios; the others are over decisions."""


def learn(
    run: VLARun,
    rollout: ChunkRollout,
    chosen: Decisions,
    settings: Update,
    meter: Meter,
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
            counts = gather_object([len(chosen.row)])
            # Nearest to the size that is asked for, in equal parts: a small remainder would be a step of large
            # variance.
            parts = max(1, round(sum(counts) / settings.minibatch))
            for dealt in deal(counts, loop.process.rank, parts, run.config.seed, "minibatches", loop.iteration, epoch):
                if not update(run, rollout, chosen, dealt, settings, meter, loss, groups):
                    return


def update(
    run: VLARun,
    rollout: ChunkRollout,
    chosen: Decisions,
    dealt: Dealt,
    settings: Update,
    meter: Meter,
    loss: Loss,
    groups: list[str],
) -> bool:
    """One optimiser step on this process's decisions of a minibatch; False where the policy has moved so far that the
    iteration's updates end before it.

    All processes make as many passes, as each of them ends with one word to the others.
    """
    local, acting = chosen.chosen(dealt.mine), Acting(run.policy, rollout.sampler)
    policy, critic, total = "policy" in groups, "critic" in groups, len(dealt.every)
    record = partial(recorded_decisions, rollout, total=total, policy=policy, critic=critic)
    passes = math.ceil(dealt.most / (settings.microbatch or dealt.most))
    sums: dict[str, Tensor] = {}

    def prepare(part: Tensor) -> Recorded | None:
        return record(local.chosen(part)) if len(part) else None

    def idle() -> Tensor:
        # A real pass over one decision: in shards the others wait for this process to gather with them.
        return 0.0 * loss(settings, acting, record(chosen.idle()))["loss"]

    def measure(part: Tensor, results: Results, recorded: Recorded) -> None:
        for name, value in results.items():
            sums[name] = sums.get(name, 0.0) + value.detach().cpu()

    def near() -> bool:
        # all processes name the same figures, also one that had no decision
        names = [*PER_RATIO, *["loss/value"] * critic, *["entropy"] * (settings.entropy_weight > 0), "number"]
        every = summed({name: float(sums.get(name, 0.0)) for name in names})
        number = max(1.0, every.pop("number"))
        means = {name: value / (number if name in PER_RATIO else total) for name, value in every.items()}
        meter.note(means if policy else {"loss/value": means["loss/value"]})
        # Before the step, so that the update which goes too far is not made.
        return not policy or settings.kl_stop is None or means["kl/updates"] <= settings.kl_stop

    parts = torch.arange(len(local.row)).tensor_split(passes)
    norms = descend(
        run.loop, settings, acting, parts, prepare, loss,
        groups=groups, done=len, measure=measure, idle=idle, before_step=near,
    )  # fmt: skip
    meter.note({f"grad_norm/{name}": norm for name, norm in norms.items()})
    return bool(norms)
