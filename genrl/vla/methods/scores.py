"""What a rollout teaches: its decisions, their log-probabilities now and then, and the actor's loss on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from genrl.mdp import chains
from genrl.objectives.advantages.episodes import informative_groups
from genrl.objectives.advantages.gae import executed_mask
from genrl.objectives.surrogates import actor_critic
from genrl.objectives.surrogates.policy_losses import clipped_surrogate
from genrl.vla.methods.ppo.settings import PPO
from genrl.vla.methods.shared_settings import Update
from genrl.vla.policies.policy import Batch
from genrl.vla.rollout.rollout import ChunkRollout, TrainingRows, episode_returns, training_rows
from genrl.vla.rollout.sampling import Diffusion, Sampler, replay


class Decisions(NamedTuple):
    """What a rollout teaches: n decisions, one for each ratio of a chunk.

    row int64 [n], counted over [T B] of the rollout; step int64 [n], which of its M ratios; the rest float64 [n], or
    [n, C] where every action has an advantage of its own.
    """

    row: Tensor
    step: Tensor
    advantage: Tensor
    returns: Tensor
    weight: Tensor

    def chosen(self, index: Tensor) -> Decisions:
        return Decisions(*(value[index] for value in self))


def decisions(rollout: ChunkRollout, advantage: Tensor, returns: Tensor, weight: Tensor) -> Decisions:
    """All valid decisions of a rollout: advantage, returns and weight [T, B], or of actions [T, B, C].

    Slot by slot: processes have neighbouring slots, so that one after the other they number the decisions of whole
    episodes as one process would, and `minibatches` deals the same ones.
    """
    slot, time = rollout.valid.T.nonzero().unbind(1)
    row = time * rollout.valid.shape[1] + slot
    ratios = rollout.log_prob.shape[2]
    at = row.repeat_interleave(ratios)
    step = torch.arange(ratios).repeat(len(row))
    return Decisions(at, step, *(value.double().flatten(0, 1)[at] for value in (advantage, returns, weight)))


def filtered(rollout: ChunkRollout, settings: Update) -> Tensor:
    """Which slots are trained on, bool [B]: of groups that neither always nor never succeed, where that is asked.

    Episodes that were lost with their simulator are not, and say nothing of their group.
    """
    kept = rollout.valid.any(0)
    if settings.success_filter is not None and bool(kept.any()):
        low, high = settings.success_filter
        returns, group = episode_returns(rollout)[kept], rollout.group[kept]
        kept[kept.clone()] = informative_groups(returns, group, low=low, high=high)
    return kept


class Scored(NamedTuple):
    """Log-probabilities [n, ...] at the level of the ratio, now and then; the context; entropy [n], in nats for a
    number, the mean over those that can reach the robot and over the scored steps."""

    log_prob: Tensor
    old_log_prob: Tensor
    counted: Tensor
    """bool, shape of log_prob: an action that was executed."""
    context: Batch
    entropy: Tensor
    rows: TrainingRows
    """What was scored."""


def score(policy: Any, rollout: ChunkRollout, chosen: Decisions, settings: Update) -> Scored:
    """The log-probabilities of some decisions under the policy as it is, and as they were drawn."""
    rows = training_rows(rollout, chosen.row)
    context = context_of(policy, rows.observation, rows.context)
    states, following, index, old = rows.states, rows.next_states, rows.step_index, rows.log_prob
    if rollout.log_prob.shape[2] > 1:  # every step is a decision of its own
        place, at = torch.arange(len(chosen.row)), chosen.step
        states, following, index, old = (value[place, at][:, None] for value in (states, following, index, old))
    again = replay(policy, rollout.sampler, context, states, following, index)
    executed = rollout.n_executed.flatten()[chosen.row]
    now = at_level(again.log_prob[:, 0], rollout, executed, settings)
    then = at_level(old[:, 0].to(now.device), rollout, executed, settings)
    counted = torch.ones_like(now, dtype=torch.bool)
    if settings.level != "chunk":
        there = executed_mask(executed, rollout.rewards.shape[-1]).to(now.device)
        counted = there if settings.level == "action" else there[..., None].expand(now.shape)
    reaching = chains.executed(again.stds, rollout.rewards.shape[-1], rollout.action_dim)
    return Scored(now, then, counted, context, chains.entropy(reaching).flatten(1).mean(1), rows)


def at_level(elements: Tensor, rollout: ChunkRollout, executed: Tensor, settings: Update) -> Tensor:
    """[n, H, A] -> log-probabilities at the level of the ratio. Actions after an episode's end do not count."""
    size = rollout.rewards.shape[-1]
    kept = chains.executed(elements, size, rollout.action_dim)
    if settings.element_clip is not None:
        kept = kept.clamp(*settings.element_clip)
    there = executed_mask(executed, size).to(kept.device)[..., None]
    found = chains.aggregate(torch.where(there, kept, 0.0), settings.level, settings.reduction)
    return found if settings.log_prob_clip is None else found.clamp(*settings.log_prob_clip)


def context_of(policy: Any, observation: Batch, kept: Batch) -> Batch:
    """Once per observation: from the features that the rollout kept, or from the observation."""
    if kept:
        device = next(policy.parameters()).device
        context: Batch = policy.context(kept["features"].to(device))
        return context
    encoded: Batch = policy.encode(observation)
    return encoded


class ActorLoss(NamedTuple):
    """loss, entropy []: sums over the elements that count, `number` [] of them; figures: sums to be logged."""

    loss: Tensor
    entropy: Tensor
    figures: dict[str, Tensor]
    number: Tensor


def actor_loss(scored: Scored, chosen: Decisions, settings: Update, sampler: Sampler, ratios: int) -> ActorLoss:
    """The clipped surrogate (PPO, eq. 7) on these decisions, summed; its entropy bonus apart."""
    device, shape = scored.log_prob.device, scored.log_prob.shape

    def spread_out(values: Tensor) -> Tensor:
        """Of decisions or actions, to every ratio of them."""
        found = values.to(device, torch.float32)
        return found.view(*found.shape, *[1] * (len(shape) - found.dim())).expand(shape)

    advantage = spread_out(chosen.advantage)
    low: Tensor | float = settings.clip_range
    if isinstance(settings, PPO) and isinstance(sampler, Diffusion):  # DPPO weighs its denoising steps
        discount = actor_critic.denoising_discount(chosen.step, ratios, settings.denoising_gamma)
        advantage = advantage * spread_out(discount)
        if settings.clip_base is not None:
            low = spread_out(
                actor_critic.denoising_clip(chosen.step, ratios, clip=settings.clip_range, base=settings.clip_base)
            )
    high = low if settings.clip_range_high is None else torch.full_like(scored.log_prob, settings.clip_range_high)
    if isinstance(high, Tensor) and not isinstance(low, Tensor):
        low = torch.full_like(high, low)
    found = clipped_surrogate(scored.log_prob, scored.old_log_prob, advantage, low, high)
    loss = found.loss
    if settings.dual_clip is not None:
        loss = actor_critic.dual_clip(loss, advantage, settings.dual_clip)
    counted = scored.counted
    weight = spread_out(chosen.weight)

    def total(values: Tensor) -> Tensor:
        return torch.where(counted, values, 0.0).sum()

    figures = {
        "loss/policy": total(loss * weight),
        "ratio/mean": total(found.ratio),
        "ratio/clipped": total(found.clipped.float()),
        "kl/updates": total(actor_critic.approximate_kl(scored.log_prob, scored.old_log_prob)),
    }
    return ActorLoss(figures["loss/policy"], scored.entropy.sum(), figures, counted.sum())
