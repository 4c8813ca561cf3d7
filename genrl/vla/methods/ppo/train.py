"""PPO on action chunks: pi_RL (Flow-SDE, Flow-Noise; arXiv 2510.25889), DPPO (2409.00588) and ReinFlow (2505.22094).

What differs between them is the transition (`sampling`) and a few settings: a decision is one drawn denoising step of a
chunk, or the whole chain. All decisions of a chunk have the advantage of its environment step; or, with `values:
action`, every action has one, and its ratios have that (pi_RL's action level).

The learning half of an iteration: epochs of minibatches of decisions, with the clipped surrogate and a critic.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.objectives import actor_critic
from genrl.objectives.episodes import Estimate, action_gae, chunk_gae, executed_mask
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Dealt, Loss, Meter, Results, deal, descend, summed
from genrl.vla.methods.ppo.settings import PPO
from genrl.vla.methods.settings import Update
from genrl.vla.rollout.collect import ChunkRollout
from genrl.vla.rollout.sampling import Acting
from genrl.vla.rollout.scores import (
    Decisions,
    Scored,
    actor_loss,
    decisions,
    filtered,
    normalised,
    recorded_decisions,
    score,
    spread_out,
)
from genrl.vla.run import VLARun


def train(run: VLARun, settings: PPO) -> None:
    """Iterations of acting, estimating and updating."""
    for iteration in run.loop.iterations():
        rollout = run.collect(settings)
        chosen, explained = estimated_decisions(run, rollout, settings)
        # values are those of the critic that acted: it must have had its warm-up
        figures, trains_policy = Meter(), iteration - run.age >= settings.critic_warmup
        learn(run, rollout, chosen, settings, figures, loss, policy=trains_policy, critic=True)
        run.finish(rollout, figures.result() | explained)


def estimated_decisions(run: VLARun, rollout: ChunkRollout, settings: PPO) -> tuple[Decisions, dict[str, float]]:
    """The decisions of a rollout with normalised advantages, returns and weights, and how well the critic explains."""
    gae = estimate(rollout, settings)
    rows = rollout.valid & filtered(rollout, settings)
    counted = estimated(rollout, rows, settings)
    advantages = normalised(gae.advantages, counted)
    weight = weights(rollout, counted, settings)
    mean = summed({"weight": float(weight.sum()), "number": float(counted.sum())})
    # To a mean of 1, so that the choice of weights does not change the size of the step.
    weight = weight * max(1.0, mean["number"]) / max(mean["weight"], 1e-9)
    chosen = decisions(rollout._replace(valid=rows), advantages, gae.returns, weight)
    return chosen, explained_variance(run, gae, counted)


def estimate(rollout: ChunkRollout, settings: PPO) -> Estimate:
    """Advantages and returns [T, B], of actions [T, B, C]; a truncated episode is bootstrapped from its final
    observation."""
    assert rollout.values is not None and rollout.next_values is not None
    rewards, following, gamma, lam = rollout.rewards, rollout.next_values, settings.gamma, settings.lam
    flags = rollout.n_executed, rollout.terminated, rollout.truncated
    if settings.values == "action":
        # A policy has a value for every action it plans; those beyond the executed ones are of no step.
        return action_gae(rewards, *flags, rollout.values[..., : rewards.shape[-1]], following, gamma=gamma, lam=lam)
    now = rollout.values[..., 0]
    return chunk_gae(rewards, *flags, now, following, gamma=gamma, lam=lam, mode=settings.discount)


def estimated(rollout: ChunkRollout, rows: Tensor, settings: PPO) -> Tensor:
    """Which advantages of these rows, bool [T, B], count: theirs, or those of the actions that were executed."""
    if settings.values == "chunk":
        return rows
    return rows[..., None] & executed_mask(rollout.n_executed, rollout.rewards.shape[-1])


def weights(rollout: ChunkRollout, kept: Tensor, settings: PPO) -> Tensor:
    """Shape of kept: 1, or the inverse of the number that the episode has of them (pi_RL, with a mask); 0 for those
    that are not kept."""
    if settings.weighting == "decisions":
        return kept.double()
    every = estimated(rollout, rollout.valid, settings)
    slot = (0,) if every.dim() == 2 else (0, 2)
    return kept.double() / every.sum(slot, keepdim=True).clamp(min=1)


def explained_variance(run: VLARun, gae: Estimate, kept: Tensor) -> dict[str, float]:
    """`1 - var(R - V) / var(R)` of the critic that acted, over what has an advantage, of all processes."""
    values = gae.returns - gae.advantages  # of the critic that acted
    pairs = torch.stack([gae.returns[kept], values[kept]])
    returns, values = torch.cat(gather_object([pairs]), 1)
    spread = float(returns.var(correction=0)) if len(returns) else 0.0
    unexplained = float((returns - values).var(correction=0)) if len(returns) else 0.0
    return {"critic/explained_variance": 1.0 - unexplained / spread if spread > 0 else 0.0}


def loss(settings: PPO, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's share of the update's loss, [], and sums of figures: surrogate, entropy bonus, critic."""
    trains_policy = bool(given["trains_policy"])
    with torch.set_grad_enabled(trains_policy):  # the critic alone needs no graph of the chain
        scored = score(settings, acting, given)
    actor = actor_loss(settings, scored, given, **denoising(settings, scored, given))
    sums, share = actor.sums, actor.loss if trains_policy else torch.zeros((), device=actor.loss.device)
    if bool(given["trains_critic"]):
        sums["loss/value"] = value_loss(settings, acting, scored, given)
        share = share + settings.value_weight * sums["loss/value"] / int(given["total"])
    return {"loss": share, **sums}


def denoising(settings: PPO, scored: Scored, given: Recorded) -> dict[str, Tensor]:
    """DPPO weighs its denoising steps: advantages and clip ranges of the decisions at each (`actor_loss`)."""
    if settings.denoising_gamma == 1 and settings.clip_base is None:
        return {}
    ratios = int(given["ratios"])
    discount = actor_critic.denoising_discount(given["step"], ratios, settings.denoising_gamma)
    advantage = spread_out(given["advantage"], scored.log_prob) * spread_out(discount, scored.log_prob)
    if settings.clip_base is None:
        return {"advantage": advantage}
    low = actor_critic.denoising_clip(given["step"], ratios, clip=settings.clip_below, base=settings.clip_base)
    return {"advantage": advantage, "low": spread_out(low, scored.log_prob)}


def value_loss(settings: PPO, acting: Acting, scored: Scored, given: Recorded) -> Tensor:
    """The critic's loss on these decisions, summed, []; of several values of a decision, their mean over the chunk."""
    value: Tensor = acting.policy.value(scored.context)[:, : int(given["size"])]
    errors = actor_critic.value_loss(
        value,
        given["returns"].view(value.shape).to(value),
        old_values=given["old_values"].to(value),
        clip=settings.value_clip,
        huber_delta=settings.huber_delta,
    )
    weight = given["weight"].view(value.shape).to(value)
    return (errors * weight).sum() / value.shape[1]


PER_RATIO = ("ratio/mean", "ratio/clipped", "kl/updates")
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
        names = ["loss/policy", *PER_RATIO, *["loss/value"] * critic, *["entropy"] * (settings.entropy_weight > 0)]
        names += ["number", *settings.measured]
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
