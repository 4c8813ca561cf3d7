"""FISOR: safe offline learning by feasibility-guided diffusion cloning (arXiv 2401.10700).

Three things from fixed data, side by side: how good (reward IQL), how safe at best (V_h, Q_h: the least worst violation
that can be reached, by a reversed expectile), and a diffusion policy cloned with weights that ask for reward where
safety can be kept and for less violation where it cannot. It acts by the least Q_h of several samples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from genrl.mdp import forward
from genrl.mdp.noise import generator
from genrl.objectives import feasibility, iql
from genrl.vla.diffusion_mlp import DiffusionMLP
from genrl.vla.offline import Behaviour, Critics, Transitions, take
from genrl.vla.policy import STATE, Batch, rows
from genrl.vla.sampling import Diffusion, Draw, sample


@dataclass(frozen=True)
class FisorSettings:
    """The released code's constants. violation, safe: h of a transition with and without cost.

    actor_rate: of the copy that acts (.001 there, in a million steps). candidates: N of the choice by Q_h.
    """

    gamma: float = 0.99
    expectile: float = 0.9
    cost_expectile: float = 0.9
    violation: float = 25.0
    safe: float = -1.0
    reward_temperature: float = 3.0
    cost_temperature: float = 5.0
    largest_cost_weight: float = 150.0
    learning_rate: float = 3e-4
    critic_batch: int = 256
    actor_batch: int = 1024
    critic_rate: float = 0.005
    actor_rate: float = 0.001
    candidates: int = 16


class Fisor(nn.Module):
    """The networks: `reward` and `violation` critics, the `actor`, and `slow_actor`, the copy that acts."""

    def __init__(self, actor: DiffusionMLP, *, width: int = 256) -> None:
        super().__init__()
        inputs, numbers = actor.config.inputs, actor.horizon * actor.action_dim
        self.reward = Critics(inputs, actor.stats, numbers, width=width)
        self.violation = Critics(inputs, actor.stats, numbers, width=width)
        self.actor = actor
        self.slow_actor = copy.deepcopy(actor).requires_grad_(False)


def critic_losses(nets: Fisor, batch: Transitions, settings: FisorSettings) -> dict[str, Tensor]:
    """The four regressions of one batch, [] each: "v", "q" of rewards, "v_h", "q_h" of violations."""
    observation, action = batch.observation, batch.action
    values = nets.reward.v(observation)
    better = nets.reward.slow_q(observation, action).amin(0)
    worst = nets.violation.v(observation)
    violating = nets.violation.slow_q(observation, action).amax(0)
    with torch.no_grad():
        following, ahead = nets.reward.v(batch.next_observation), nets.violation.v(batch.next_observation)
    target = iql.q_target(batch.reward, following, batch.terminated, batch.discount)
    h = torch.where(batch.cost > 0, settings.violation, settings.safe)
    reach = feasibility.feasibility_target(h, ahead, ~batch.terminated, settings.gamma)
    return {
        "v": iql.expectile_loss(better - values, settings.expectile).mean(),
        "q": (nets.reward.q_values(observation, action) - target).square().mean(),
        "v_h": feasibility.reversed_expectile_loss(violating - worst, settings.cost_expectile).mean(),
        "q_h": (nets.violation.q_values(observation, action) - reach).square().mean(),
    }


@torch.no_grad()
def weights(nets: Fisor, observation: Batch, action: Tensor, settings: FisorSettings) -> Tensor:
    """`feasibility.cloning_weights` of data actions, [N]."""
    return feasibility.cloning_weights(
        nets.reward.slow_q(observation, action).amin(0),
        nets.reward.v(observation),
        nets.violation.slow_q(observation, action).amax(0),
        nets.violation.v(observation),
        reward_temperature=settings.reward_temperature,
        cost_temperature=settings.cost_temperature,
        largest_cost_weight=settings.largest_cost_weight,
    )


def actor_loss(
    nets: Fisor, batch: Transitions, sampler: Diffusion, settings: FisorSettings, rng: torch.Generator
) -> Tensor:
    """Weighted noise regression on the chunks of a batch, []."""
    actor, count = nets.actor, len(batch.action)
    actions = actor.normalised(batch.action)
    noise = torch.randn(actions.shape, generator=rng)
    timestep = torch.randint(sampler.train_steps, (count,), generator=rng)
    bars = sampler.grid.alpha_bar.flip(0)
    x = forward.diffusion_sample(actions, noise, bars[timestep])
    predicted = actor.noise(actor.encode(batch.observation), x, timestep)
    weight = weights(nets, batch.observation, batch.action, settings)
    return feasibility.weighted_noise_loss(predicted.flatten(1), noise.flatten(1), weight)


def train(
    nets: Fisor,
    data: Transitions,
    sampler: Diffusion,
    settings: FisorSettings,
    *,
    steps: int,
    seed: int,
    first: int = 0,
) -> Iterator[dict[str, float]]:
    """Steps `first` to `steps` of critics and actor together, yielding their losses.

    Begin at a later step only with the optimisers of `optimisers` restored: batches are functions of (seed, step).
    """
    critics, actor = optimisers(nets, settings)
    for step in range(first, steps):
        yield train_step(nets, data, sampler, settings, critics, actor, seed=seed, step=step)


def optimisers(nets: Fisor, settings: FisorSettings) -> tuple[torch.optim.Adam, torch.optim.Adam]:
    """Adam of the critics and of the actor."""
    of_critics = [p for net in (nets.reward, nets.violation) for p in net.parameters() if p.requires_grad]
    return (
        torch.optim.Adam(of_critics, lr=settings.learning_rate),
        torch.optim.Adam(nets.actor.parameters(), lr=settings.learning_rate),
    )


def train_step(
    nets: Fisor,
    data: Transitions,
    sampler: Diffusion,
    settings: FisorSettings,
    critics: torch.optim.Optimizer,
    actor: torch.optim.Optimizer,
    *,
    seed: int,
    step: int,
) -> dict[str, float]:
    """One update of the critics and one of the actor, each with a batch of its own; then the slow copies follow."""
    rng = generator(seed, "fisor", step)
    batch = take(data, torch.randint(len(data.reward), (settings.critic_batch,), generator=rng))
    losses = critic_losses(nets, batch, settings)
    critics.zero_grad(set_to_none=True)
    torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    critics.step()
    nets.reward.follow(settings.critic_rate)
    nets.violation.follow(settings.critic_rate)
    batch = take(data, torch.randint(len(data.reward), (settings.actor_batch,), generator=rng))
    loss = actor_loss(nets, batch, sampler, settings, rng)
    actor.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    actor.step()
    with torch.no_grad():
        for slow, fast in zip(nets.slow_actor.parameters(), nets.actor.parameters(), strict=True):
            slow.lerp_(fast, settings.actor_rate)
    return {name: value.item() for name, value in losses.items()} | {"actor": loss.item()}


def safest(nets: Fisor, sampler: Diffusion, *, candidates: int, seed: int) -> Behaviour:
    """The behaviour of a trained policy: of N samples of the slow actor the one of least max Q_h, in robot units.

    Noise is a function of (seed, decision, slot).
    """
    policy = nets.slow_actor

    @torch.no_grad()
    def behave(observation: Batch, decision: int) -> Tensor:
        count, chunk = len(observation[STATE]), (policy.horizon, policy.action_dim)
        rng = generator(seed, "safest", decision)
        noise = torch.randn((count * candidates, sampler.steps + 1, *chunk), generator=rng)
        repeated = torch.arange(count).repeat_interleave(candidates)
        context = rows(policy.encode(observation), repeated)
        drawn = Draw(noise, torch.ones(len(noise), sampler.steps, dtype=torch.bool))
        actions = policy.actions(sample(policy, sampler, context, drawn).chunk)
        risk = nets.violation.slow_q(rows(observation, repeated), actions).amax(0).view(count, candidates)
        best: Tensor = actions.view(count, candidates, *chunk)[torch.arange(count), risk.argmin(1)]
        return best

    return behave
