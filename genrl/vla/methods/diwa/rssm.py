"""A recurrent state-space model: what happens next, in latents (PlaNet, arXiv 1811.04551; DreamerV2, arXiv 2010.02193).

A latent is (h, z): h [B, D] deterministic, by a GRU from what was before; z [B, S] sampled, from h alone (the prior, in
imagination) or from h and the observation (the posterior, in the world). z is Gaussian: the categorical one of
DreamerV2 suits pictures, and observations here are a few precise numbers. Observations [B, O], actions [B, A], in the
robot's units.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

from genrl.mdp.noise import generator
from genrl.vla.offline.imitation import step_beside
from genrl.vla.policies.normalise import normalise, statistics, unnormalise

_LEAST_STD = 0.05


class Latent(NamedTuple):
    """h [B, D], z [B, S]."""

    h: Tensor
    z: Tensor

    def rows(self, index: Tensor) -> Latent:
        """The rows `index` (numbers or a mask)."""
        return Latent(self.h[index], self.z[index])

    def shown(self) -> dict[str, NDArray[np.float32]]:
        """A copy under the environments' names."""
        return {"agent_pos": self.h.numpy().copy(), "environment_state": self.z.numpy().copy()}


class WorldModel(nn.Module):
    """GRU of width `deterministic`, z of width `stochastic`, MLPs of two hidden layers; statistics are buffers."""

    observation_mean: Tensor
    observation_std: Tensor
    action_mean: Tensor
    action_std: Tensor

    def __init__(self, observation: Tensor, action: Tensor, *, deterministic: int = 128, stochastic: int = 32) -> None:
        """observation [.., O], action [.., A]: the data, whose statistics (mean, std) are kept."""
        super().__init__()
        self.deterministic, self.stochastic = deterministic, stochastic
        for name, values in (("observation", observation), ("action", action)):
            stats = statistics(values)
            self.register_buffer(f"{name}_mean", stats["mean"])
            self.register_buffer(f"{name}_std", stats["std"].clamp(min=0.02))
        observation_dim, done, width = observation.shape[-1], action.shape[-1], 2 * deterministic
        self.entry = nn.Sequential(nn.Linear(stochastic + done, deterministic), nn.SiLU())
        self.cell = nn.GRUCell(deterministic, deterministic)
        self.prior = _mlp(deterministic, width, 2 * stochastic)
        self.posterior = _mlp(deterministic + observation_dim, width, 2 * stochastic)
        self.decoder = _mlp(deterministic + stochastic, width, observation_dim)

    def start(self, count: int) -> Latent:
        """Before the first observation: zeros."""
        like = self.cell.weight_hh
        return Latent(like.new_zeros(count, self.deterministic), like.new_zeros(count, self.stochastic))

    def forward_h(self, latent: Latent, action: Tensor) -> Tensor:
        """h after an action [B, A], taken in a latent."""
        acted = normalise(action, self._stats("action"), "MEAN_STD")
        h: Tensor = self.cell(self.entry(torch.cat([latent.z, acted], 1)), latent.h)
        return h

    def expected(self, h: Tensor) -> Normal:
        """The prior of z."""
        return _gaussian(self.prior(h))

    def seen(self, h: Tensor, observation: Tensor) -> Normal:
        """The posterior of z."""
        normalised = normalise(observation, self._stats("observation"), "MEAN_STD")
        return _gaussian(self.posterior(torch.cat([h, normalised], 1)))

    def decode(self, latent: Latent) -> Tensor:
        """The observation that a latent stands for, [B, O]."""
        return unnormalise(self.decoder(torch.cat(latent, 1)), self._stats("observation"), "MEAN_STD")

    @torch.no_grad()
    def imagine(self, latent: Latent, action: Tensor, noise: Tensor) -> Latent:
        """The next latent without looking; noise [B, S] standard normal."""
        h = self.forward_h(latent, action)
        prior = self.expected(h)
        return Latent(h, prior.mean + prior.stddev * noise)

    @torch.no_grad()
    def look(self, latent: Latent, action: Tensor, observation: Tensor) -> Latent:
        """The next latent with the observation seen: the mean of the posterior."""
        h = self.forward_h(latent, action)
        return Latent(h, self.seen(h, observation).mean)

    @torch.no_grad()
    def first(self, observation: Tensor) -> Latent:
        """The latent of the first observation of an episode."""
        nothing = self.start(len(observation))
        h = self.forward_h(nothing, self.action_mean.expand(len(observation), -1))
        return Latent(h, self.seen(h, observation).mean)

    def _stats(self, name: str) -> dict[str, Tensor]:
        return {"mean": getattr(self, f"{name}_mean"), "std": getattr(self, f"{name}_std")}


class WorldLoss(NamedTuple):
    """reconstruction, [] (normalised units, summed over numbers, half squares); kl [], balanced; loss []."""

    reconstruction: Tensor
    kl: Tensor
    loss: Tensor


def balanced_kl(posterior: Normal, prior: Normal, *, balance: float) -> Tensor:
    """`balance KL(sg(q) || p) + (1 - balance) KL(q || sg(p))` summed over z, [B]: DreamerV2, algorithm 2; balance .8.

    Its value is the KL in nats; its gradient moves the prior more than the posterior.
    """
    still_q, still_p = (Normal(g.mean.detach(), g.stddev.detach(), validate_args=False) for g in (posterior, prior))
    first, second = kl_divergence(still_q, prior).sum(-1), kl_divergence(posterior, still_p).sum(-1)
    return balance * first + (1.0 - balance) * second


def world_loss(
    model: WorldModel,
    observations: Tensor,
    actions: Tensor,
    noise: Tensor,
    *,
    balance: float = 0.8,
    kl_scale: float = 0.03,
) -> WorldLoss:
    """The loss of sequences: observations [B, T + 1, O], actions [B, T, A] between them, noise [B, T + 1, S].

    kl_scale weighs the KL against half squares of normalised observations: small numbers ask for precision.
    """
    latent = model.start(len(observations))
    before = model.action_mean.expand(len(observations), -1)
    normalised = normalise(observations, model._stats("observation"), "MEAN_STD")
    errors, kls = [], []
    for t in range(observations.shape[1]):
        h = model.forward_h(latent, before)
        prior, posterior = model.expected(h), model.seen(h, observations[:, t])
        latent = Latent(h, posterior.mean + posterior.stddev * noise[:, t])
        errors.append(0.5 * (model.decoder(torch.cat(latent, 1)) - normalised[:, t]).square().sum(-1))
        if t:  # nothing foretells the first observation
            kls.append(balanced_kl(posterior, prior, balance=balance))
        if t < actions.shape[1]:
            before = actions[:, t]
    reconstruction, kl = torch.stack(errors).mean(), torch.stack(kls).mean()
    return WorldLoss(reconstruction, kl, reconstruction + kl_scale * kl)


def world_step(
    model: WorldModel,
    optimiser: torch.optim.Optimizer,
    observations: Tensor,
    actions: Tensor,
    *,
    length: int,
    seed: int,
    step: int,
    batch_size: int = 64,
) -> WorldLoss:
    """One update on `batch_size` windows of `length` actions of data [E, T + 1, O] and [E, T, A], by (seed, step)."""
    rng = generator(seed, "world", step)
    episode = torch.randint(len(actions), (batch_size,), generator=rng)
    begin = torch.randint(actions.shape[1] - length + 1, (batch_size,), generator=rng)
    window = begin[:, None] + torch.arange(length + 1)
    noise = torch.randn((batch_size, length + 1, model.stochastic), generator=rng)
    window_observations, done = observations[episode[:, None], window], actions[episode[:, None], window[:, :-1]]
    losses = world_loss(model, window_observations, done, noise)
    step_beside(optimiser, losses.loss, 100.0)
    return WorldLoss(*(value.detach() for value in losses))


def _mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def _gaussian(numbers: Tensor) -> Normal:
    mean, raw = numbers.chunk(2, -1)
    # A least spread, or the KL of a sure prior to a slightly different posterior grows without bound.
    return Normal(mean, functional.softplus(raw) + _LEAST_STD, validate_args=False)
