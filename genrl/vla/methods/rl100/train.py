"""RL-100 (arXiv 2510.14830): imitation, offline RL gated by offline evaluation, online RL, one-step distillation.

One surrogate serves offline and online: chunks drawn by a copy of the policy, an advantage for each (of critics that
were learned from data, or of episodes), PPO's clip at every denoising step, and an optimiser step for each of these.

What looks at pictures or points is frozen from the end of imitation on; critics, model and updates read what it sees.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from genrl.mdp import chains
from genrl.mdp.noise import derive_seed, generator, seeded
from genrl.objectives.actor_critic import approximate_kl, expectile_loss
from genrl.objectives.episodes import chunk_gae, normalise_advantages
from genrl.objectives.policy_losses import clipped_surrogate
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter, deal
from genrl.vla.methods.rl100.experience import (
    Dynamics,
    acted,
    collected,
    demonstrated,
    distilled,
    offline_value,
    success_of,
    train_dynamics,
)
from genrl.vla.methods.rl100.settings import DECAYED, RL100
from genrl.vla.offline.critics import Critics, Learning, seen_statistics, train_iql
from genrl.vla.offline.imitation import Step, followed, imitate, mean_of_last, observation_of, step_beside, stepper
from genrl.vla.offline.transitions import Store, Transitions, frames_of, merge, successful, take
from genrl.vla.policies.policy import STATE, Batch, Inputs, Policy, rows
from genrl.vla.rollout.collect import ChunkRollout, training_rows
from genrl.vla.rollout.sampling import Acting, Sampler
from genrl.vla.setup import sampler_of

if TYPE_CHECKING:
    from genrl.vla.run import VLARun

IMITATION_BATCH, IMITATION_LR = 128, 1e-3
"""Frames per step of the imitation that comes first, and its learning rate."""
UNION_LR = 1e-4
"""Learning rate of the imitation that ends a round."""
GATE_STEPS, GATE_STARTS = 20, 256
"""Decisions that a candidate is imagined for (RL-100: 20), and states of the data from which it is."""
ONLINE_CLIP, ONLINE_EPOCHS, ONLINE_BATCH = 0.2, 2, 512
"""Clip range online, passes over the decisions of an iteration, and decisions of a batch (RL-100: 0.2, 10, 128)."""
CRITICS = Learning(gamma=0.98)
"""How the critics are learned, and the discount of all data."""


class Chunks(NamedTuple):
    """B chunks and what PPO needs of them: observation; states, next_states [B, N, H, A], step_index [B, N]; log_prob
    [B, N], of the executed part of the chunk, summed; advantage [B]."""

    observation: Batch
    states: Tensor
    next_states: Tensor
    step_index: Tensor
    log_prob: Tensor
    advantage: Tensor


def decayed_clip(clip: float, decay: float, uses: int, *, until: int = 200) -> float:
    """`clip decay^min(uses, until)`: the clip range of the offline phase (.25, .96, the first 200 uses)."""
    return float(clip * decay ** min(uses, until))


@torch.no_grad()
def draw_at(
    old: Policy, sampler: Sampler, critics: Critics, observation: Batch, rng: torch.Generator, *, executed: int
) -> Chunks:
    """Chunks of the behaviour copy at states of the data, with `min Q(s, a) - V(s)` normalised over the batch."""
    count = len(observation[STATE])
    rngs = [torch.Generator().manual_seed(seed) for seed in torch.randint(2**62, (count,), generator=rng).tolist()]
    sampled = sampler.sample(old, old.encode(observation), sampler.noise(old, rngs))
    actions = old.actions(sampled.chunk)
    advantage = normalise_advantages(critics.advantage(observation, actions), eps=1e-8).float()
    log_prob = _sums(sampled.log_prob, executed)
    return Chunks(observation, sampled.states, sampled.next_states, sampled.step_index, log_prob, advantage)


def surrogate_steps(
    policy: Policy, sampler: Sampler, step: Step, batch: Chunks, *, clip: float, executed: int
) -> Iterator[dict[str, float]]:
    """An optimiser step for every denoising step i, noisiest first: `-mean min(r_i A, clip(r_i, 1 -+ clip) A)`.

    r_i is of the chunk's executed part; `step` takes the loss, []. Yields {"loss/policy", "kl/updates",
    "ratio/clipped"} of each. Raises TypeError for a sampler whose chain is one decision (`LearnedNoise`).
    """
    if batch.log_prob.shape[1] != batch.states.shape[1]:
        raise TypeError(f"RL-100 needs a ratio for every denoising step, {type(sampler).__name__} has one per chain")
    tensors = {f"observation/{name}": value for name, value in batch.observation.items()}
    tensors |= {"advantage": batch.advantage, "clip": torch.tensor(clip, dtype=torch.float64)}
    tensors |= {"executed": torch.tensor(executed)}
    for i in range(batch.states.shape[1]):
        row = slice(i, i + 1)
        record = {"states": batch.states[:, row], "next_states": batch.next_states[:, row]}
        record |= {"step_index": batch.step_index[:, row], "old_log_prob": batch.log_prob[:, i]}
        results = step(Recorded(None, tensors | record))
        yield {
            "loss/policy": results["loss"].item(),
            "kl/updates": results["kl/updates"].item(),
            "ratio/clipped": results["ratio/clipped"].item(),
        }


def loss(settings: RL100, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """`-mean min(r A, clip(r, 1 -+ clip) A)` of one denoising step, [], and figures."""
    policy, clip = acting.policy, float(given["clip"])
    record = (given["states"], given["next_states"], given["step_index"])
    replay = acting.sampler.replay(policy, policy.encode(observation_of(given)), *record)
    log_prob = _sums(replay.log_prob, int(given["executed"]))[:, 0]
    old = given["old_log_prob"].to(log_prob)
    surrogate = clipped_surrogate(log_prob, old, given["advantage"].to(log_prob), clip, clip)
    return {
        "loss": surrogate.loss.mean(),
        "kl/updates": approximate_kl(log_prob, old).mean(),
        "ratio/clipped": surrogate.clipped.float().mean(),
    }


@torch.no_grad()
def online_batch(
    rollout: ChunkRollout, critics: Critics, *, gamma: float, lam: float, executed: int
) -> tuple[Chunks, Tensor, Batch]:
    """A rollout's decisions with GAE done right, their returns [n], and their observations.

    Discount gamma^n for n executed actions, an end not bootstrapped, a time limit bootstrapped from the true next
    observation, traces cut at both, per slot: `episodes.chunk_gae`, "smdp". V is that of the offline phase.
    """
    decisions, count = rollout.valid.shape
    flat = {name: value.flatten(0, 1) for name, value in rollout.observations.items()}
    values = critics.v(flat).cpu().view(decisions + 1, count)
    flags = (rollout.terminated, rollout.truncated)
    gae = chunk_gae(
        *(rollout.rewards, rollout.n_executed, *flags, values[:-1], values[1:]), gamma=gamma, lam=lam, mode="smdp"
    )
    index = rollout.valid.flatten().nonzero()[:, 0]
    chosen = training_rows(rollout, index)
    advantage = normalise_advantages(gae.advantages.flatten()[index], eps=1e-5).float()
    log_prob = _sums(chosen.log_prob, executed)
    record = (chosen.states, chosen.next_states, chosen.step_index)
    batch = Chunks(chosen.observation, *record, log_prob, advantage)
    return batch, gae.returns.flatten()[index].float(), chosen.observation


def part(batch: Chunks, index: Tensor) -> Chunks:
    """Some rows of a batch."""
    return Chunks(rows(batch.observation, index), *(value[index] for value in batch[1:]))


def inputs_of(policy: Any) -> Inputs:
    """What the policy reads. Raises ValueError for a policy whose worth cannot be imagined."""
    inputs: Inputs | None = getattr(policy.config, "inputs", None)
    if inputs is None:
        raise ValueError(
            f"policy.path: rl100's critics and model read what an embedded policy reads, and a {type(policy).__name__} "
            "has inputs of its own; write policy.new, or train it by ppo or grpo"
        )
    return inputs


def train(run: VLARun, settings: RL100) -> None:
    """Imitation of the frames (where the policy is new), rounds of offline RL, online RL, the one-step copy."""
    config, loop, policy = run.config, run.loop, run.policy
    inputs = inputs_of(policy)
    if inputs.looks and config.optimizer.weight_decay:
        raise ValueError(f"optimizer.weight_decay: {DECAYED}")
    with seeded(config.seed, "critics"):
        numbers, stats = policy.horizon * policy.action_dim, policy.stats
        critics = Critics(replace(inputs, image=0, points=0, seen=policy.encoder.sees), stats, numbers)
    store = Store(critics=critics.to(loop.process.accelerator.device))
    loop.keep("rl100", store)
    if not store.ready:
        if run.frames is not None:
            loop.phase("imitating")
            steps, size = settings.imitation_steps, IMITATION_BATCH
            mean_of_last(
                imitate(policy, run.frames, steps=steps, batch_size=size, learning_rate=IMITATION_LR, seed=config.seed)
            )
        demonstrations = demonstrated(config, policy, CRITICS.gamma)
        store.data = {} if demonstrations is None else {"transitions": demonstrations}
        store.ready = True
    if inputs.looks:  # what it sees is kept in place of what it looked at (`experience.seen`)
        policy.encoder.requires_grad_(False)
    if "transitions" in store.data and loop.iteration > 0:  # a checkpoint from before it was kept
        store.data.setdefault("seen", seen_statistics(store.data["transitions"]))
    critics.normalise_by(store.data.get("seen", {}))
    step = stepper(run, settings, loss)
    for iteration in loop.iterations():
        if iteration < settings.rounds:
            row = offline_round(run, settings, store, critics, step, iteration)
        else:
            row = online_iteration(run, settings, critics, step, iteration)
        if iteration == config.iterations - 1 and settings.distil_steps:
            row |= distilled(run, settings, store.data["transitions"].observation)
        loop.finish(row | {"lr": loop.lr, "rollout/env_steps": float(loop.memory["env_steps"])})


def offline_round(
    run: VLARun, settings: RL100, store: Store, critics: Critics, step: Step, iteration: int
) -> dict[str, float]:
    """Collect with the policy and merge, learn critics and model, improve under the gate, imitate the union."""
    config, loop, policy = run.config, run.loop, run.policy
    sampler, seed = sampler_of(config, policy), derive_seed(config.seed, "round", iteration)
    with loop.timed("rollout"):
        new = collected(run, sampler, settings.episodes, iteration, CRITICS.gamma)
    datasets = [store.data["transitions"]] if "transitions" in store.data else []
    data = store.data["transitions"] = merge(*datasets, new)
    if "seen" not in store.data:  # critics learn on in later rounds, so the numbers that they read keep their meaning
        store.data["seen"] = seen_statistics(data)
        critics.normalise_by(store.data["seen"])
    figures = {"data/transitions": float(len(data.reward)), "data/success_mean": success_of(new)}
    with loop.timed("critics"):
        count = settings.critic_steps
        learned = train_iql(critics, data, CRITICS, steps=count, seed=seed)
        figures |= followed(run, "learning critics", count, learned, "critic")
        with seeded(config.seed, "round", iteration):
            model = Dynamics(data, policy.stats | store.data["seen"]).to(loop.process.accelerator.device)
        how: dict[str, Any] = {"batch_size": CRITICS.batch_size, "learning_rate": CRITICS.lr}
        figures["dynamics/loss"] = mean_of_last(
            train_dynamics(model, data, steps=settings.dynamics_steps, seed=seed, **how)
        )
    with loop.timed("train"):
        figures |= improve(run, settings, critics, model, data, step, iteration, seed)
    if settings.union_steps:
        loop.phase("imitating")
        chosen = data if config.environment.success_key is None else take(data, successful(data))
        frames, steps, size = frames_of(chosen), settings.union_steps, settings.batch_size
        figures["loss/imitation"] = mean_of_last(
            imitate(policy, frames, steps=steps, batch_size=size, learning_rate=UNION_LR, seed=seed)
        )
    return figures


class Gate:
    """Which policy the trust region is centred on: a candidate takes the place of the old one if it is judged better.

    best: the value of the old policy, the highest so far. accepted, refused: how many candidates were.
    """

    def __init__(self, best: float) -> None:
        self.best, self.accepted, self.refused = best, 0, 0

    def admits(self, value: float) -> bool:
        """Whether a candidate of this value is accepted, which makes it the best."""
        if value > self.best:
            self.best, self.accepted = value, self.accepted + 1
            return True
        self.refused += 1
        return False


def improve(
    run: VLARun,
    settings: RL100,
    critics: Critics,
    model: Dynamics,
    data: Transitions,
    step: Step,
    iteration: int,
    seed: int,
) -> dict[str, float]:
    """The gated updates of one round; the policy is the accepted one at the end."""
    loop, policy = run.loop, run.policy
    sampler, figures = sampler_of(run.config, policy), Meter()
    chosen = torch.randint(len(data.reward), (GATE_STARTS,), generator=generator(seed, "starts"))
    start = rows(data.observation, chosen)

    def worth() -> float:
        return offline_value(policy, sampler, model, critics, start, steps=GATE_STEPS, seed=seed)

    gate, old = Gate(worth()), copy.deepcopy(policy).requires_grad_(False)
    first = gate.best
    loop.phase("training", settings.steps_per_iteration)
    for update in range(settings.steps_per_iteration):
        rng = generator(seed, "update", update)
        index = torch.randint(len(data.reward), (settings.batch_size,), generator=rng)
        observation = rows(data.observation, index)
        batch = draw_at(old, sampler, critics, observation, rng, executed=run.env.chunk)
        clip = decayed_clip(settings.clip_range, settings.clip_decay, update)
        for row in surrogate_steps(policy, sampler, step, batch, clip=clip, executed=run.env.chunk):
            figures.note(row)
        if (update + 1) % settings.gate_every == 0 and gate.admits(worth()):
            old.load_state_dict(policy.state_dict())
        loop.advance(1)
    # What came after the last accepted candidate was never judged better, so it is not kept.
    policy.load_state_dict(old.state_dict())
    counts = {"gate/accepted": float(gate.accepted), "gate/refused": float(gate.refused)}
    return figures.result() | counts | {"gate/value": gate.best, "gate/gain": gate.best - first}


def online_iteration(run: VLARun, settings: RL100, critics: Critics, step: Step, iteration: int) -> dict[str, float]:
    """PPO on episodes of the policy, with V of the offline phase, which learns on."""
    config, loop, policy = run.config, run.loop, run.policy
    sampler, figures, executed = sampler_of(config, policy), Meter(), run.env.chunk
    with loop.timed("rollout"):
        rollout = acted(run, sampler, iteration, 0)
    gamma = CRITICS.gamma
    batch, returns, observation = online_batch(rollout, critics, gamma=gamma, lam=settings.lam, executed=executed)
    optimiser = torch.optim.Adam(critics.v.parameters(), lr=CRITICS.lr)
    count = len(returns)
    loop.phase("training", ONLINE_EPOCHS * count)
    with loop.timed("train"):
        for epoch in range(ONLINE_EPOCHS):
            parts = max(1, round(count / ONLINE_BATCH))
            for dealt in deal([count], 0, parts, config.seed, "minibatches", iteration, epoch):
                chosen = part(batch, dealt.mine)
                for row in surrogate_steps(policy, sampler, step, chosen, clip=ONLINE_CLIP, executed=executed):
                    figures.note(row)
                error = critics.v(rows(observation, dealt.mine)) - returns[dealt.mine].to(
                    loop.process.accelerator.device
                )
                # The expectile of a half is the mean: online, V is to be what the policy gets, not what its best
                # actions would.
                step_beside(optimiser, expectile_loss(error, 0.5).mean())
                figures.note({"critic/value_loss": error.square().mean().item()})
                loop.advance(len(dealt.mine))
    first = rollout.valid & (rollout.episode == 0)
    success = float((rollout.success & first).any(0).float().mean())
    return figures.result() | {"rollout/success": success}


def _sums(log_prob: Tensor, executed: int) -> Tensor:
    """[B, N, H, A] -> [B, N], over the executed actions."""
    return chains.executed(log_prob, executed, log_prob.shape[-1]).flatten(2).sum(-1)
