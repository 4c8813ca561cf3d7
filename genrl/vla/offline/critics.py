"""Critics of observations and chunks, and implicit Q-learning of them from transitions (arXiv 2110.06169).

Advantage-weighted regression of a policy on data (arXiv 1910.00177, with IQL's critics 2110.06169, eq. 7).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from genrl.mdp import ddpm
from genrl.mdp.noise import generator
from genrl.objectives import actor_critic
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Loss, Meter
from genrl.vla import setup
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import world_of
from genrl.vla.offline.imitation import cloning_errors, followed, recorded_chunks, step_beside, stepper
from genrl.vla.offline.transitions import (
    Reader,
    Transitions,
    Words,
    frames_of,
    successful,
    take,
)
from genrl.vla.policies.encoder import MODES, ObservationEncoder, value_head
from genrl.vla.policies.policy import ACTION, SEEN, Batch, Inputs, PredictsNoise, Statistics, vocabulary
from genrl.vla.policies.robot import normalise
from genrl.vla.rollout.sampling import Acting

if TYPE_CHECKING:
    from genrl.vla.run import VLARun


class Learning(NamedTuple):
    """How two Q and a V are learned from data by implicit Q-learning.

    gamma: discount of one action, gamma^n over a chunk of n. expectile: that of Q which is V, above 0.5 it leans to the
    best actions of the data (RL-100: 0.7). rate: how fast the slow copies follow in a step (FISOR: 0.005).
    """

    gamma: float
    expectile: float = 0.7
    batch_size: int = 256
    rate: float = 0.01
    lr: float = 1e-3


def seen_statistics(data: Transitions) -> Statistics:
    """Mean and spread of what an encoder has seen in the data, whose numbers may be of any size; empty where it has
    looked at nothing."""
    if SEEN not in data.observation:
        return {}
    values = data.observation[SEEN]
    # A feature that never varies in the data would be divided by 0.
    return {SEEN: {"mean": values.mean(0), "std": values.std(0).clamp(min=1e-6)}}


class CriticNet(nn.Module):
    """Observation, and chunk where it has `numbers` of them -> [N]: the policies' encoder of its own, then an MLP."""

    def __init__(self, inputs: Inputs, stats: Statistics, numbers: int, width: int) -> None:
        super().__init__()
        self.stats, self.numbers = stats, numbers
        self.encoder = ObservationEncoder(inputs, stats)
        self.head = value_head(self.encoder.size + numbers, width, 2, nn.Mish())

    def forward(self, observation: Batch, action: Tensor | None = None) -> Tensor:
        features = self.encoder(observation)
        if self.numbers:
            assert action is not None
            # beyond the range of the data the robot does no more, and the critic knows nothing
            chunk = normalise(action.to(features.device), self.stats[ACTION], MODES["ACTION"]).clamp(-1.0, 1.0)
            features = torch.cat([features, chunk.flatten(1)], 1)
        value: Tensor = self.head(features)[:, 0]
        return value


class Critics(nn.Module):
    """Two Q of (observation, chunk), their slow copies, and V of the observation."""

    def __init__(self, inputs: Inputs, stats: Statistics, numbers: int, *, width: int = 128) -> None:
        super().__init__()
        self.q = nn.ModuleList(CriticNet(inputs, stats, numbers, width) for _ in range(2))
        self.slow = copy.deepcopy(self.q).requires_grad_(False)
        self.v = CriticNet(inputs, stats, 0, width)

    def normalise_by(self, stats: Statistics) -> None:
        """Normalise by these statistics, too, from here on: those of `SEEN` are known when there are data."""
        for net in (*self.q, *self.slow, self.v):
            net.encoder.stats = net.encoder.stats | stats

    def q_values(self, observation: Batch, action: Tensor) -> Tensor:
        """[2, N] of the trained copies."""
        return torch.stack([net(observation, action) for net in self.q])

    @torch.no_grad()
    def slow_q(self, observation: Batch, action: Tensor) -> Tensor:
        """[2, N] of the slow copies."""
        return torch.stack([net(observation, action) for net in self.slow])

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """slow <- slow + rate (q - slow)."""
        for slow, fast in zip(self.slow.parameters(), self.q.parameters(), strict=True):
            slow.lerp_(fast, rate)

    @torch.no_grad()
    def advantage(self, observation: Batch, action: Tensor) -> Tensor:
        """`min Q(s, a) - V(s)`, [N]."""
        value: Tensor = self.v(observation)
        return self.slow_q(observation, action).amin(0) - value


def train_iql(
    critics: Critics, transitions: Transitions, settings: Learning, *, steps: int, seed: int
) -> Iterator[dict[str, float]]:
    """Train the critics by IQL, yielding {"q_loss", "value_loss", "value"} of every step.

    Batches are functions of (seed, step).
    """
    device = next(critics.parameters()).device
    trained = [parameter for parameter in critics.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=settings.lr)
    for step in range(steps):
        index = torch.randint(len(transitions.reward), (settings.batch_size,), generator=generator(seed, "iql", step))
        batch = take(transitions, index)
        # The smaller of two slow copies: errors of Q that look like good actions would be what V leans to.
        q_slow = critics.slow_q(batch.observation, batch.action).amin(0)
        value = critics.v(batch.observation)
        value_loss = actor_critic.expectile_loss(q_slow - value, settings.expectile).mean()
        with torch.no_grad():
            # V in place of the largest Q: no action is judged that the data do not have.
            following = critics.v(batch.next_observation)
        target = actor_critic.q_target(
            batch.reward.to(device), following, batch.terminated.to(device), batch.discount.to(device)
        )
        q_loss = (critics.q_values(batch.observation, batch.action) - target).square().mean()
        step_beside(optimiser, value_loss + q_loss)
        critics.follow(settings.rate)
        yield {"q_loss": q_loss.item(), "value_loss": value_loss.item(), "value": value.mean().item()}


LARGEST_WEIGHT = 100.0
"""Bound of the weight of a data action in the policy's regression (IQL: 100)."""


GAMMA = 0.97
"""Discount of an action, of the data and of their critics."""


def wayward_data(config: VLAConfig, episodes: int, right: float, reads: Reader, horizon: int) -> Transitions:
    """So many episodes of a player of the world who does what it is told in a share `right` of them."""
    data: Transitions = world_of(config).wayward_data(config, episodes, right, reads, horizon, GAMMA)
    return data


def new_policy(config: VLAConfig, episodes: int, right: float, inputs: tuple[str, ...]) -> Any:
    """A policy for `wayward_data`, which reads these inputs, with weights by the seed."""
    assert config.policy.new is not None
    words = vocabulary(world_of(config).lines)
    data = wayward_data(config, episodes, right, Words(words, inputs), config.policy.new.horizon)
    return setup.new_policy(config, frames_of(data), words)


def advantage_of(
    run: VLARun, settings: Any, critics: Critics, data: Transitions, gap: str, *, batch_size: int
) -> tuple[Tensor, dict[str, float]]:
    """Train the critics on data whose episodes are known to have succeeded or not: the advantage of the data's chunks
    [N], and figures, among them, as `gap`, how much more it is in the episodes that succeeded. settings: `episodes` of
    the data and `critic_steps`."""
    steps, how = settings.critic_steps, Learning(GAMMA, batch_size=batch_size)
    figures = train_iql(critics, data, how, steps=steps, seed=run.config.seed)
    metrics = followed(run, "learning critics", steps, figures, "critic")
    won, advantage = successful(data), critics.advantage(data.observation, data.action).cpu()
    metrics["data/success_mean"] = float(data.success.sum()) / settings.episodes
    return advantage, metrics | {gap: float(advantage[won].mean() - advantage[~won].mean())}


def weighted_cloning(acting: Acting, given: Recorded) -> Tensor:
    """Mean of weight times the squared error of the policy's prediction, over chunks of the data, []."""
    return (given["weight"] * cloning_errors(acting.policy, given)).mean()


def regress(
    run: VLARun, settings: Any, loss: Loss, data: Transitions, advantage: Tensor, figures: Mapping[str, float]
) -> None:
    """All iterations: `steps_per_iteration` steps on `batch_size` decisions, weighted by exp(`temperature` advantage).

    advantage [N] of the data's chunks; figures: logged with every iteration.
    """
    config, loop, policy = run.config, run.loop, run.policy
    # `advantage_weights` takes Q and V: the advantage stands for both.
    device, nothing = loop.process.accelerator.device, torch.zeros_like(advantage)
    weight = actor_critic.advantage_weights(
        advantage, nothing, temperature=settings.temperature, largest=LARGEST_WEIGHT
    )
    alpha_bars = ddpm.cosine_alpha_bars(policy.train_steps if isinstance(policy, PredictsNoise) else 20)
    step = stepper(run, settings, loss)
    for _ in loop.iterations():
        loop.phase("training", settings.steps_per_iteration)
        meter = Meter()
        with loop.timed("train"):
            for _ in range(settings.steps_per_iteration):
                rng = generator(config.seed, "regression", loop.optimizer_steps)
                index = torch.randint(len(advantage), (settings.batch_size,), generator=rng)
                batch = take(data, index)
                actions, paid = batch.action.to(device), weight[index].to(device)
                recorded = recorded_chunks(policy, batch.observation, actions, alpha_bars, rng, paid)
                meter.note({"loss/policy": step(recorded)["loss"].item()})
                loop.advance(1)
        loop.finish(dict(figures) | meter.result() | {"lr": loop.lr})
