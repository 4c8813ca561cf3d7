"""Critics of observations and chunks, and implicit Q-learning of them from transitions (arXiv 2110.06169)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genrl.mdp.noise import generator
from genrl.objectives import actor_critic
from genrl.vla.offline.descent import step_beside
from genrl.vla.offline.transitions import Transitions, take
from genrl.vla.policies.encoder import MODES, ObservationEncoder, value_head
from genrl.vla.policies.normalise import normalise
from genrl.vla.policies.policy import ACTION, SEEN, Batch, Inputs, Statistics


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
            following = critics.v(batch.next_observation)
        target = actor_critic.q_target(
            batch.reward.to(device), following, batch.terminated.to(device), batch.discount.to(device)
        )
        q_loss = (critics.q_values(batch.observation, batch.action) - target).square().mean()
        step_beside(optimiser, value_loss + q_loss)
        critics.follow(settings.rate)
        yield {"q_loss": q_loss.item(), "value_loss": value_loss.item(), "value": value.mean().item()}
