"""What a rollout teaches: its decisions, their log-probabilities now and then, and the actor's loss on them; and what
its episodes were like."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.mdp import chains
from genrl.objectives import actor_critic
from genrl.objectives.episodes import executed_mask, informative_groups, normalise_advantages
from genrl.objectives.policy_losses import clipped_surrogate, truncated_weight
from genrl.runtime.loop.recorded import Recorded
from genrl.vla.methods.settings import Update
from genrl.vla.policies.policy import Batch
from genrl.vla.rollout.collect import ChunkRollout, episode_returns, training_rows
from genrl.vla.rollout.sampling import Acting, Replay


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

    def idle(self) -> Decisions:
        """The first decision of the rollout, to teach nothing."""
        return Decisions(*(value.new_zeros(1, *value.shape[1:]) for value in self))


def decisions(rollout: ChunkRollout, advantage: Tensor, returns: Tensor, weight: Tensor) -> Decisions:
    """All valid decisions of a rollout: advantage, returns and weight [T, B], or of actions [T, B, C].

    Slot by slot: processes have neighbouring slots, so that one after the other they number the decisions of whole
    episodes as one process would, and `deal` deals the same ones.
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
    trained = rollout.valid.any(0)
    if settings.success_filter is not None and bool(trained.any()):
        low, high = settings.success_filter
        returns, group = episode_returns(rollout)[trained], rollout.group[trained]
        # A clone: the mask would be written while it selects.
        trained[trained.clone()] = informative_groups(returns, group, low=low, high=high)
    return trained


def recorded_decisions(rollout: ChunkRollout, chosen: Decisions, *, total: int, policy: bool, critic: bool) -> Recorded:
    """All that the loss of these decisions reads. total: decisions of the update, over all processes. policy, critic:
    which of them the update trains."""
    rows = training_rows(rollout, chosen.row)
    states, following, index, old = rows.states, rows.next_states, rows.step_index, rows.log_prob
    further = {name: value.flatten(0, 1)[chosen.row] for name, value in rollout.further.items()}
    ratios, size = rollout.log_prob.shape[2], rollout.rewards.shape[-1]
    if ratios > 1:  # every step is a decision of its own
        place, at = torch.arange(len(chosen.row)), chosen.step
        states, following, index, old = (value[place, at][:, None] for value in (states, following, index, old))
        further = {name: value[place, at][:, None] for name, value in further.items()}
    tensors = {f"observation/{name}": value for name, value in rows.observation.items()}
    tensors |= {f"context/{name}": value for name, value in rows.context.items()}
    tensors |= {"states": states, "next_states": following, "step_index": index, "old_log_prob": old}
    tensors |= {"step": chosen.step, "advantage": chosen.advantage, "weight": chosen.weight}
    tensors |= {"executed": rollout.n_executed.flatten()[chosen.row]}
    if rollout.importance is not None:
        tensors["importance"] = rollout.importance.flatten(0, 1)[chosen.row, chosen.step]
    numbers = {"total": total, "ratios": ratios, "size": size, "action_dim": rollout.action_dim}
    numbers |= {"trains_policy": policy, "trains_critic": critic}
    tensors |= {name: torch.tensor(value) for name, value in numbers.items()}
    if critic:
        assert rollout.values is not None
        # actions beyond those that are executed have no value to learn
        tensors |= {"returns": chosen.returns, "old_values": rollout.values.flatten(0, 1)[chosen.row, :size]}
    return Recorded(None, tensors | further | rollout.shared)


class Scored(NamedTuple):
    """Log-probabilities [n, ...] at the level of the ratio, now and then; the context; entropy [n], in nats for a
    number, the mean over those that can reach the robot and over the scored steps; what the policy does now."""

    log_prob: Tensor
    old_log_prob: Tensor
    counted: Tensor
    """bool, shape of log_prob: an action that was executed."""
    context: Batch
    entropy: Tensor
    replay: Replay


def score(settings: Update, acting: Acting, given: Recorded) -> Scored:
    """The log-probabilities of some decisions under the policy as it is, and as they were sampled."""
    context = context_of(acting.policy, named(given, "observation/"), named(given, "context/"))
    replay = acting.sampler.replay(acting.policy, context, given["states"], given["next_states"], given["step_index"])
    executed, size, action_dim = given["executed"], int(given["size"]), int(given["action_dim"])
    now = at_level(replay.log_prob[:, 0], executed, size, action_dim, settings)
    then = at_level(given["old_log_prob"][:, 0].to(now.device), executed, size, action_dim, settings)
    counted = torch.ones_like(now, dtype=torch.bool)
    if settings.level != "chunk":
        executed_actions = executed_mask(executed, size).to(now.device)
        counted = executed_actions if settings.level == "action" else executed_actions[..., None].expand(now.shape)
    reaching = chains.executed(replay.entropy, size, action_dim)
    return Scored(now, then, counted, context, reaching.flatten(1).mean(1), replay)


def named(given: Recorded, prefix: str) -> Batch:
    """The recorded tensors under a prefix ("observation/"), by what follows it."""
    return {name.removeprefix(prefix): value for name, value in given.tensors.items() if name.startswith(prefix)}


def at_level(elements: Tensor, executed: Tensor, size: int, action_dim: int, settings: Update) -> Tensor:
    """[n, H, A] -> log-probabilities at the level of the ratio. Actions after an episode's end do not count."""
    reaching = chains.executed(elements, size, action_dim)
    if settings.element_clip is not None:
        # Before the sum: one number far off its mean would decide the ratio of the whole chunk.
        reaching = reaching.clamp(*settings.element_clip)
    executed_actions = executed_mask(executed, size).to(reaching.device)[..., None]
    return chains.aggregate(torch.where(executed_actions, reaching, 0.0), settings.level, settings.reduction)


def context_of(policy: Any, observation: Batch, kept: Batch) -> Batch:
    """Once per observation: from the features that the rollout kept, or from the observation."""
    if kept:
        device = next(policy.parameters()).device
        context: Batch = policy.context(kept["features"].to(device))
        return context
    encoded: Batch = policy.encode(observation)
    return encoded


class ActorLoss(NamedTuple):
    """loss []: this micro-batch's share of the update's; sums: figures over the elements that count, to be logged."""

    loss: Tensor
    sums: dict[str, Tensor]


def spread_out(values: Tensor, like: Tensor) -> Tensor:
    """Values of decisions or actions spread to every ratio of them, in the shape of `like`."""
    # Advantages are made in float64; the surrogate is one of float32 log-probabilities.
    tensor = values.to(like.device, torch.float32)
    return tensor.view(*tensor.shape, *[1] * (like.dim() - tensor.dim())).expand(like.shape)


def normalised(advantages: Tensor, kept: Tensor) -> Tensor:
    """Advantages [T, B] centred and scaled by those that are kept, of all processes; 0 where none is."""
    every = torch.cat(gather_object([advantages[kept].double()]))
    if len(every) == 0:
        return torch.zeros_like(advantages)
    # The kept ones of all processes give mean and spread; this process's own, appended, are scaled by them.
    pooled = torch.cat([every, advantages.double().flatten()])
    valid = torch.arange(len(pooled)) < len(every)
    return normalise_advantages(pooled, valid, eps=1e-5)[len(every) :].view(advantages.shape)


def actor_loss(
    settings: Update, scored: Scored, given: Recorded, *, advantage: Tensor | None = None, low: Tensor | None = None
) -> ActorLoss:
    """The clipped surrogate (PPO, eq. 7) on these decisions, with its entropy bonus. advantage, low: instead of the
    decisions' own and of `clip_range`, in the shape of the log-probabilities."""
    if advantage is None:
        advantage = spread_out(given["advantage"], scored.log_prob)
    if "importance" in given:  # the surrogate is linear in it where it is not clipped
        advantage = advantage * spread_out(given["importance"], scored.log_prob)
    below: Tensor | float = settings.clip_below if low is None else low
    above = below
    if isinstance(settings.clip_range, tuple):
        above = torch.full_like(scored.log_prob, settings.clip_range[1])
        below = below if isinstance(below, Tensor) else torch.full_like(above, below)
    surrogate = clipped_surrogate(scored.log_prob, scored.old_log_prob, advantage, below, above)
    loss = surrogate.loss
    if settings.dual_clip is not None:
        loss = actor_critic.dual_clip(loss, advantage, settings.dual_clip)
    counted, weight = scored.counted, spread_out(given["weight"], scored.log_prob)

    def total(values: Tensor) -> Tensor:
        return torch.where(counted, values, 0.0).sum()

    # A level below the chunk has several ratios in a decision: the loss is the mean over them.
    each, of_policy = scored.log_prob[0].numel(), total(loss * weight)
    sums = {
        "loss/policy": of_policy / each,
        "ratio/mean": total(surrogate.ratio),
        "ratio/clipped": total(surrogate.clipped.float()),
        "kl/updates": total(actor_critic.approximate_kl(scored.log_prob, scored.old_log_prob)),
        "number": counted.sum(),
    }
    count = int(given["total"])
    share = of_policy / (count * each)
    if settings.entropy_weight:
        sums["entropy"] = scored.entropy.sum()
        share = share - settings.entropy_weight * sums["entropy"] / count
    return ActorLoss(share, sums)


# Rollouts of earlier weights as policy gradients learn from them: decoupled PPO (arXiv 2110.00641, eq. 3) with weights
# of at most 1.


@torch.no_grad()
def weighed(
    policy: Any, rollout: ChunkRollout, settings: Update, fitting: Callable[[], AbstractContextManager[None]]
) -> ChunkRollout:
    """The rollout with the log-probabilities of valid decisions under the proximal policy, which is the policy before
    the first update, in the place of those under the behaviour policy, which acted; and the importance weights of the
    one to the other, where the settings ask for them. fitting: around every pass of the policy; `check_stop` comes
    next."""
    index = rollout.valid.flatten().nonzero()[:, 0]
    size, ratios = rollout.rewards.shape[-1], rollout.log_prob.shape[2]
    proximal, executed = rollout.log_prob.flatten(0, 1).clone(), rollout.n_executed.flatten()
    for part in index.split(settings.microbatch or settings.minibatch):
        rows = training_rows(rollout, part)
        with fitting():
            context = context_of(policy, rows.observation, rows.context)
            replay = rollout.sampler.replay(policy, context, rows.states, rows.next_states, rows.step_index)
        proximal[part] = replay.log_prob.cpu()
    now = rollout._replace(log_prob=proximal.view(rollout.log_prob.shape))
    if settings.importance == "none":
        return now

    def leveled(log_prob: Tensor) -> Tensor:
        each = [at_level(log_prob[:, n], executed, size, rollout.action_dim, settings) for n in range(ratios)]
        return torch.stack(each, 1)

    importance = truncated_weight(leveled(proximal), leveled(rollout.log_prob.flatten(0, 1)))
    return now._replace(importance=importance.view(*rollout.valid.shape, *importance.shape[1:]))


def importance_figures(rollout: ChunkRollout) -> dict[str, float]:
    """What the weights of the valid decisions are like, in all processes."""
    assert rollout.importance is not None
    weights = rollout.importance[rollout.valid]
    if weights.dim() > 2:  # of actions, or their numbers: those that were executed
        weights = weights.transpose(1, 2)[executed_mask(rollout.n_executed[rollout.valid], weights.shape[2])]
    every: list[Tensor] = gather_object([weights.flatten().double()])
    weights = torch.cat(every)
    if not len(weights):
        return {}
    return {
        "importance/mean": float(weights.mean()),
        "importance/max_abs_dev": float((weights - 1.0).abs().max()),
    }


class FirstEpisodes(NamedTuple):
    """The first episode of each slot of a process that was not lost with its simulator, a list entry each; steps: all
    that were executed in the rollout."""

    returns: list[float]
    success: list[bool]
    instruction: list[Any]
    group: list[int]
    length: list[int]
    ended: list[bool]
    steps: int


def of_first_episodes(rollout: ChunkRollout) -> FirstEpisodes:
    """First episodes alone: of later ones a rollout of fixed length would hold more short ones than long ones."""
    first = rollout.valid & (rollout.episode == 0)
    complete = first.any(0)
    return FirstEpisodes(
        returns=episode_returns(rollout)[complete].tolist(),
        success=(rollout.success & first).any(0)[complete].tolist(),
        instruction=[rollout.instruction[slot] for slot in complete.nonzero()[:, 0].tolist()],
        group=rollout.group[complete].tolist(),
        length=(rollout.n_executed * first).sum(0)[complete].tolist(),
        ended=(rollout.done & first).any(0)[complete].tolist(),
        steps=int(rollout.n_executed.sum()),
    )


def episode_figures(every: Sequence[FirstEpisodes], *, by_group: bool) -> dict[str, float]:
    """Figures of the episodes of all processes. by_group: whether episodes of a group begin alike."""
    success = [flag for part in every for flag in part.success]
    lengths = [n for part in every for n, ended in zip(part.length, part.ended, strict=True) if ended]
    outcomes: dict[Any, set[bool]] = defaultdict(set)
    for part in every:
        for key, flag in zip(part.group if by_group else part.instruction, part.success, strict=True):
            outcomes[key].add(flag)
    return {
        "rollout/success": sum(success) / max(1, len(success)),
        "rollout/return_mean": sum(sum(part.returns) for part in every) / max(1, len(success)),
        "rollout/length_mean": sum(lengths) / max(1, len(lengths)),
        # Only groups (without groups, instructions) with both outcomes have anything to compare.
        "rollout/mixed": sum(len(flags) == 2 for flags in outcomes.values()) / max(1, len(outcomes)),
    }
