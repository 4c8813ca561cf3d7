"""The learning half of an iteration: epochs of minibatches of decisions, with the clipped surrogate and a critic."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from genrl.config.vla import PPO, Update
from genrl.objectives import actor_critic
from genrl.vla.rollout import ChunkRollout
from genrl.vla.scores import Decisions, actor_loss, score

if TYPE_CHECKING:
    from genrl.vla.session import Session


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
    session: Session,
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
    loop = session.loop
    groups = [name for name, used in (("policy", policy), ("critic", critic)) if used]
    loop.phase("training", settings.epochs * len(chosen.row))
    with loop.timed("train"):
        for epoch in range(settings.epochs):
            for batch in session.dealt(len(chosen.row), settings, epoch):
                if not update(session, rollout, chosen.chosen(batch.mine), batch.total, settings, figures, groups):
                    return


def update(
    session: Session,
    rollout: ChunkRollout,
    mine: Decisions,
    total: int,
    settings: Update,
    figures: Figures,
    groups: list[str],
) -> bool:
    """One optimiser step on the decisions `mine`, this process's of `total`; False where the policy has moved so far
    that the iteration's updates end before it."""
    sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(()))
    counted = torch.zeros(())
    with torch.set_grad_enabled(True):
        for part in torch.split(torch.arange(len(mine.row)), settings.microbatch or max(1, len(mine.row))):
            one = mine.chosen(part)
            scored = score(session.policy, rollout, one, settings)
            found = actor_loss(scored, one, settings, rollout.sampler, rollout.log_prob.shape[2])
            # a level below the chunk has several ratios in a decision: the mean is over them
            each = scored.log_prob[0].numel()
            loss = torch.zeros((), device=found.loss.device)
            if "policy" in groups:
                loss = loss + found.loss / (total * each) - settings.entropy_weight * found.entropy / total
            if "critic" in groups:
                assert isinstance(settings, PPO) and rollout.values is not None
                value = session.policy.value(scored.context)
                errors = actor_critic.value_loss(
                    value,
                    one.returns.to(value),
                    old_values=rollout.values.flatten()[one.row].to(value),
                    clip=settings.value_clip,
                    huber_delta=settings.huber_delta,
                )
                value_loss = (errors * one.weight.to(value)).sum()
                loss = loss + settings.value_weight * value_loss / total
                sums["loss/value"] = sums["loss/value"] + value_loss.detach().cpu() * each
            for name, figure in found.figures.items():
                sums[name] = sums[name] + figure.detach().cpu()
            if settings.entropy_weight:
                sums["entropy"] = sums["entropy"] + found.entropy.detach().cpu() * each
            counted = counted + found.number.cpu()
            evidence = {"log_prob": scored.log_prob, "old_log_prob": scored.old_log_prob, "advantage": one.advantage}
            session.loop.backward(loss, evidence=evidence, info={"trainer": settings.model_dump(mode="json")})
            session.loop.advance(len(part))
    means = session.mean(dict(sums), counted)
    if "policy" in groups:
        figures.add(means)
        if settings.kl_stop is not None and means.get("kl/updates", 0.0) > settings.kl_stop:
            session.loop.optimizer.zero_grad(set_to_none=True)
            return False
    elif "loss/value" in means:
        figures.add({"loss/value": means["loss/value"]})
    norms = session.loop.step(groups)
    figures.add({f"grad_norm/{name}": norm for name, norm in norms.items()})
    return True
