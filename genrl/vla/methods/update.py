"""The learning half of an iteration: epochs of minibatches of decisions, with the clipped surrogate and a critic."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from genrl.objectives.surrogates import actor_critic
from genrl.runtime.recorded import Recorded
from genrl.vla.methods.minibatches import Minibatch
from genrl.vla.methods.ppo.settings import PPO
from genrl.vla.methods.scores import Decisions, Scored, actor_loss, score
from genrl.vla.methods.shared_settings import Update
from genrl.vla.rollout.rollout import ChunkRollout

if TYPE_CHECKING:
    from genrl.vla.run import VLARun

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
            for batch in run.dealt(len(chosen.row), settings, epoch):
                if not update(run, rollout, chosen, batch, settings, figures, groups):
                    return


def update(
    run: VLARun,
    rollout: ChunkRollout,
    chosen: Decisions,
    batch: Minibatch,
    settings: Update,
    figures: Figures,
    groups: list[str],
) -> bool:
    """One optimiser step on this process's decisions of a minibatch; False where the policy has moved so far that the
    iteration's updates end before it.

    All processes make as many passes, as each of them ends with one word to the others.
    """
    mine, ratios = chosen.chosen(batch.mine), rollout.log_prob.shape[2]
    passes = math.ceil(batch.most / (settings.microbatch or batch.most))
    names = [
        *PER_RATIO,
        *(["loss/value"] if "critic" in groups else []),
        *(["entropy"] * (settings.entropy_weight > 0)),
    ]
    sums = {name: torch.zeros(()) for name in (*names, "number")}
    with torch.set_grad_enabled(True):
        for part in torch.arange(len(mine.row)).tensor_split(passes):
            loss, evidence = torch.zeros(()), {}
            if len(part):  # else it is another process that has the last ones
                one = mine.chosen(part)
                with torch.set_grad_enabled("policy" in groups):  # the critic alone needs no graph of the chain
                    scored = score(run.policy, rollout, one, settings)
                found = actor_loss(scored, one, settings, rollout.sampler, ratios)
                parts = found.figures | {"number": found.number}
                loss = torch.zeros((), device=found.loss.device)
                if "policy" in groups:
                    # a level below the chunk has several ratios in a decision: the mean is over them
                    each = scored.log_prob[0].numel()
                    loss = loss + found.loss / (batch.total * each)
                    if settings.entropy_weight:
                        loss = loss - settings.entropy_weight * found.entropy / batch.total
                if settings.entropy_weight:
                    parts["entropy"] = found.entropy
                if "critic" in groups:
                    parts["loss/value"] = value_loss(run.policy, rollout, scored, one, settings)
                    loss = loss + settings.value_weight * parts["loss/value"] / batch.total  # type: ignore[attr-defined]
                sums = {name: value + parts[name].detach().cpu() for name, value in sums.items()}
                evidence = evidence_of(scored, one)
            run.loop.backward(settings, {"loss": loss}, Recorded(None, evidence))
            run.loop.advance(len(part))
    summed = run.summed(sums)
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


def evidence_of(scored: Scored, chosen: Decisions) -> dict[str, torch.Tensor]:
    """What a loss that is not finite was made from: all that `score` and `actor_loss` read but the weights."""
    rows = scored.rows
    named = {"log_prob": scored.log_prob, "old_log_prob": scored.old_log_prob, "states": rows.states}
    named |= {"next_states": rows.next_states, "step_index": rows.step_index} | chosen._asdict()
    return named | rows.observation | {f"context.{name}": value for name, value in rows.context.items()}


def value_loss(policy: Any, rollout: ChunkRollout, scored: Scored, chosen: Decisions, settings: Update) -> torch.Tensor:
    """The critic's loss on these decisions, summed, []; of several values of a decision, their mean over the chunk."""
    assert isinstance(settings, PPO) and rollout.values is not None
    size = rollout.rewards.shape[-1]  # actions beyond those that are executed have no value to learn
    value: torch.Tensor = policy.value(scored.context)[:, :size]
    errors = actor_critic.value_loss(
        value,
        chosen.returns.view(value.shape).to(value),
        old_values=rollout.values.flatten(0, 1)[chosen.row, :size].to(value),
        clip=settings.value_clip,
        huber_delta=settings.huber_delta,
    )
    weight = chosen.weight.view(value.shape).to(value)
    return (errors * weight).sum() / value.shape[1]
