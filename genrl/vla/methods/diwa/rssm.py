"""A recurrent state-space model: what happens next, in latents (PlaNet, arXiv 1811.04551; DreamerV2, arXiv 2010.02193).

A latent is (h, z): h [B, D] deterministic, by a GRU from what was before; z [B, S] sampled, from h alone (the prior, in
imagination) or from h and the observation (the posterior, in the world). z is Gaussian: the categorical one of
DreamerV2 suits pictures, and observations here are a few precise numbers. Observations [B, O], actions [B, A], in the
robot's units.

Imagination as an environment (DiWA, arXiv 2508.03645) shows latents, "agent_pos" the deterministic h and
"environment_state" the sampled z of `Latent`, and is a `contract.Environment`, as the real world is that the same model
looks at (`demonstrations.World.seen_by`): a policy on latents acts in either, and what trains on tables trains in
dreams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

from genrl.mdp.noise import derive_seed, generator
from genrl.vla.data.frames import STD_FLOOR
from genrl.vla.offline.imitation import step_beside
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch, Inputs
from genrl.vla.policies.robot import normalise, statistics, unnormalise

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
            self.register_buffer(f"{name}_std", stats["std"].clamp(min=STD_FLOOR))
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
        # Nothing was done before it: the mean action is 0 once normalised.
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
    # DreamerV2's largest norm.
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


Shown = dict[str, NDArray[Any]]
Floats = NDArray[np.float32]


def latent_inputs(world: WorldModel, vocabulary: tuple[str, ...]) -> Inputs:
    """What a policy on latents reads: h, z and the instruction."""
    return Inputs(state=world.deterministic, vocabulary=vocabulary, environment=world.stochastic)


def as_observation(latent: Latent, tokens: Tensor) -> Batch:
    """A latent and its instruction under the policy's names."""
    return {STATE: latent.h, ENVIRONMENT: latent.z, TOKENS: tokens}


class Starts(NamedTuple):
    """Where dreams begin: latents of real beginnings [S, ..], and instructions of them [S]."""

    latent: Latent
    instructions: Sequence[str]


class Dream:
    """`num_envs` dreams: chunks are executed in the frozen world model, one latent step per action.

    draw: pictures of the observations that latents stand for. judge: says after every step whether the instruction is
    fulfilled, which is reward 1 and ends the dream; max_steps actions without it truncate. Next-step auto-reset,
    "rewards", "n_executed" and "is_success" as in `contract.Environment`.
    Episode k of dream i begins from a start, and draws z with noise, that are functions of (seed, i // group_size, k);
    actions are clipped to [-1, 1].
    """

    in_order = False

    def __init__(
        self,
        world: WorldModel,
        judge: Any,
        starts: Starts,
        *,
        draw: Callable[[Floats, int], NDArray[np.uint8]],
        num_envs: int,
        chunk: int,
        max_steps: int,
        group_size: int = 1,
    ) -> None:
        places, lines = len(starts.latent.h), len(starts.instructions)
        if places != lines or not lines:
            raise ValueError(f"{places} starts have {lines} instructions: one each, and one at least")
        self.world, self.judge, self.starts, self.draw = world, judge, starts, draw
        self.num_envs, self.chunk, self.group_size, self._limit = num_envs, chunk, group_size, max_steps
        self.max_steps: int | None = max_steps
        self.waited_s, self.dropped, self.restarts, self.action_dim, self.first_slot = 0.0, 0, 0, 3, 0
        self._latent = world.start(num_envs)
        self._start = np.zeros(num_envs, dtype=np.int64)
        self._count = np.zeros(num_envs, dtype=np.int64)
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._ended = np.zeros(num_envs, dtype=np.bool_)
        self._rngs: list[torch.Generator] = []
        self._first: NDArray[np.uint64] | None = None

    @property
    def task_description(self) -> list[str]:
        """The instruction of each dream."""
        return [self.starts.instructions[place] for place in self._start.tolist()]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Shown, dict[str, Any]]:
        """Begin episode 0 of the seed everywhere, or the numbered ones of options["episodes"] (uint64 [n])."""
        groups = np.arange(self.num_envs, dtype=np.uint64) // np.uint64(self.group_size)
        chosen = (options or {}).get("episodes")
        self._first = groups + np.uint64(derive_seed(seed or 0, "dreams")) if chosen is None else np.asarray(chosen)
        self._count[:] = 0
        self._rngs = [torch.Generator() for _ in range(self.num_envs)]
        self._begin(np.ones(self.num_envs, dtype=np.bool_))
        empty = np.zeros((self.num_envs, self.chunk), dtype=np.float32)
        return self._latent.shown(), self._info(empty, np.zeros(self.num_envs, dtype=np.int64))

    def step(self, actions: Floats, /) -> tuple[Shown, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Imagine a chunk in every dream that goes on; begin the next one in the others."""
        if self._first is None:
            raise RuntimeError("call reset before step")
        chunks = torch.from_numpy(np.asarray(actions, dtype=np.float32)).clamp(-1.0, 1.0)
        if chunks.shape != (self.num_envs, self.chunk, self.action_dim):
            raise ValueError(
                f"actions must have shape [{self.num_envs}, {self.chunk}, {self.action_dim}], got {list(chunks.shape)}"
            )
        resetting = self._ended
        alive = ~resetting
        rewards = np.zeros((self.num_envs, self.chunk), dtype=np.float32)
        executed = np.zeros(self.num_envs, dtype=np.int64)
        terminated = np.zeros(self.num_envs, dtype=np.bool_)
        tokens = self.judge.tokenise(self.task_description)
        for k in range(self.chunk):
            at = torch.from_numpy(np.flatnonzero(alive))
            if not len(at):
                break
            # Each dream by its own generator: what it dreams does not depend on how long the others last.
            noise = torch.stack([torch.randn(self.world.stochastic, generator=self._rngs[i]) for i in at.tolist()])
            after = self.world.imagine(self._latent.rows(at), chunks[at, k], noise)
            self._latent.h[at], self._latent.z[at] = after.h, after.z
            executed += alive
            self._elapsed += alive
            done = np.zeros(self.num_envs, dtype=np.bool_)
            done[at.numpy()] = self.judge.fulfilled(as_observation(after, tokens[at])).numpy()
            rewards[done, k] = 1.0
            terminated |= done
            alive = alive & ~done & (self._elapsed < self._limit)
        truncated = ~resetting & ~terminated & (self._elapsed >= self._limit)
        if resetting.any():
            self._count[resetting] += 1
            self._begin(resetting)
        self._ended = terminated | truncated
        return self._latent.shown(), rewards.sum(1), terminated, truncated, self._info(rewards, executed)

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """What some dreams look like: the tables that their latents stand for, [n, 128, 128, 3]."""
        pictures = self.world.decode(self._latent.rows(torch.tensor(list(slots)))).detach().numpy()
        pictures[:, 2] -= 0.5  # a number, not a flag: held from the half on
        return self.draw(pictures, 128)

    def close(self) -> None:
        """Nothing was started."""

    def _begin(self, chosen: NDArray[np.bool_]) -> None:
        assert self._first is not None
        for slot in np.flatnonzero(chosen).tolist():
            self._rngs[slot].manual_seed(derive_seed(int(self._first[slot]), "dream", int(self._count[slot])))
            self._start[slot] = int(torch.randint(len(self.starts.instructions), (), generator=self._rngs[slot]))
        at, start = torch.from_numpy(chosen), torch.from_numpy(self._start[chosen])
        self._latent.h[at], self._latent.z[at] = self.starts.latent.h[start], self.starts.latent.z[start]
        self._elapsed[chosen] = 0
        self._ended = self._ended & ~chosen

    def _info(self, rewards: Floats, executed: NDArray[np.int64]) -> dict[str, Any]:
        return {"rewards": rewards, "n_executed": executed, "is_success": rewards.any(1)}
