"""Sampling chunks from a policy, and scoring them again: one transition rule for both, by kind of sampler.

Of a chunk's K denoising steps N are kept: those that are scored. A record is [B, N, ...] states, the states that
followed, and the number of the step (`step_index`); K + 1 states are in it only where all were sampled.
Log-probabilities are per element, [B, M, H, A]: M = N where every step is a decision (two layers: `FlowSteps`,
`Diffusion`), M = 1 where the chain is one (`LearnedNoise`). `chains.executed` and `chains.aggregate` make ratios of
them.

On the rows it was sampled with, `replay` computes what `sample` did, bit for bit; on other batches a matrix product may
round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from genrl.mdp import chains, ddpm, kernels, schedules
from genrl.mdp.chains import Chain
from genrl.mdp.gaussian import Reduction
from genrl.mdp.kernels import Transition
from genrl.vla.policies.policy import Batch, LearnsNoise, Policy, PredictsChunk, PredictsNoise, PredictsVelocity


@dataclass(frozen=True)
class FlowSteps:
    """Flow-SDE (pi_RL) or Flow-CPS: the steps of `selection` are sampled (`chains.noisy_steps`), others are the ODE.

    noise_level: .5 in pi_RL; a small policy needs 1, for the later ODE steps contract the noise of the earlier ones.
    The level belongs to the record: anneal by a new sampler. Two steps at least; the last of Flow-CPS is deterministic,
    it needs skip_last.
    """

    kernel: Literal["flow_sde", "flow_cps"] = "flow_sde"
    steps: int = 4
    noise_level: float = 1.0
    selection: chains.Selection = "random_per_env"
    count: int = 1
    skip_last: bool = False

    def __post_init__(self) -> None:
        if self.steps < 2 or self.noise_level <= 0:
            raise ValueError(f"need 2 steps and a positive noise level, got {self.steps} and {self.noise_level}")
        if self.kernel == "flow_cps" and not self.skip_last:
            raise ValueError("the last step of Flow-CPS is deterministic and cannot be scored: set skip_last")


@dataclass(frozen=True)
class LearnedNoise:
    """Flow-Noise of pi_RL by default; ReinFlow is mean_clip 1, noise_clip 3, last_clip 1, reduction "sum".

    All steps are sampled with the policy's std, between low and high, and the log-probability is that of the chain,
    with its initial noise where `initial` (see `chains.chain_log_prob`). A small policy needs about [.2, .6].
    """

    steps: int = 4
    low: float = 0.08
    high: float = 0.16
    initial: bool = True
    reduction: Reduction = "mean"
    mean_clip: float | None = None
    noise_clip: float | None = None
    last_clip: float | None = None


@dataclass(frozen=True)
class Diffusion:
    """DPPO: `steps` of `train_steps` (all: DDPM; fewer: DDIM, eta 1), the last `ft_denoising_steps` sampled and scored.

    The others are sampled, too, with the policy as it was before: `sample` wants it. floor: least std, to sample and
    to score. schedule: of the noise, that which the policy was trained with ("vp" in FISOR).
    """

    train_steps: int = 20
    steps: int = 20
    ft_denoising_steps: int = 10
    floor: float = 0.1
    noise_clip: float = 3.0
    last_clip: float = 1.0
    schedule: Literal["cosine", "vp"] = "cosine"

    def __post_init__(self) -> None:
        if not 1 <= self.ft_denoising_steps <= self.steps <= self.train_steps:
            raise ValueError(
                "need 1 <= ft_denoising_steps <= steps <= train_steps; got "
                f"{self.ft_denoising_steps}, {self.steps} and {self.train_steps}"
            )

    @property
    def grid(self) -> ddpm.DenoisingGrid:
        bars = (ddpm.vp_alpha_bars if self.schedule == "vp" else ddpm.cosine_alpha_bars)(self.train_steps)
        return ddpm.ddpm_grid(bars) if self.steps == self.train_steps else ddpm.ddim_grid(bars, self.steps)


@dataclass(frozen=True)
class Direct:
    """The policy says its chunk outright: there is nothing to sample or to score, `act` alone knows it."""


Sampler = FlowSteps | LearnedNoise | Diffusion


class ChunkNoise(NamedTuple):
    """All that is random in B chunks: noise [B, K + 1, H, A], the initial one first; noisy bool [B, K], see `kept`."""

    noise: Tensor
    noisy: Tensor


class Sample(NamedTuple):
    """chunk [B, H, A], normalised; states, next_states [B, N, H, A]; step_index [B, N]; log_prob [B, M, H, A]."""

    chunk: Tensor
    states: Tensor
    next_states: Tensor
    step_index: Tensor
    log_prob: Tensor


class Replay(NamedTuple):
    """log_prob [B, M, H, A], means and stds [B, N, H, A] of the scored steps, all with gradients."""

    log_prob: Tensor
    means: Tensor
    stds: Tensor


class Acting(NamedTuple):
    """A policy with the sampler it acts by, and, of DPPO, the policy that does the first denoising steps."""

    policy: Any
    sampler: Any
    frozen: Any = None


class Frozen(NamedTuple):
    """The policy before fine-tuning, and its context of the same observations: who does DPPO's first steps."""

    policy: Policy
    context: Batch


def chunk_noise(
    sampler: Sampler, policy: Policy, generators: Sequence[torch.Generator], shared: torch.Generator | None = None
) -> ChunkNoise:
    """What chunk i needs, from generator i alone; `shared` chooses the step of "random_per_batch"."""
    shape = (sampler.steps + 1, policy.horizon, policy.action_dim)
    noise = torch.stack([torch.randn(shape, generator=own) for own in generators])
    if isinstance(sampler, LearnedNoise):
        return ChunkNoise(noise, torch.ones(len(noise), sampler.steps, dtype=torch.bool))
    if isinstance(sampler, Diffusion):
        place = torch.arange(sampler.steps)
        return ChunkNoise(
            noise, ddpm.fine_tuned(place, sampler.steps, sampler.ft_denoising_steps).expand(len(noise), -1)
        )

    def choose(rows: int, rng: torch.Generator | None) -> Tensor:
        count, skip = sampler.count, sampler.skip_last
        return chains.noisy_steps(sampler.selection, rows, sampler.steps, count=count, skip_last=skip, generator=rng)

    if sampler.selection == "random_per_env":
        return ChunkNoise(noise, torch.cat([choose(1, own) for own in generators]))
    return ChunkNoise(noise, choose(len(noise), shared))


def transition(
    policy: Policy, sampler: Sampler, context: Batch, x: Tensor, index: Tensor, noisy: Tensor | None = None
) -> Transition:
    """The step `index` [B] of each row from x [B, H, A]: mean [B, H, A], std broadcastable to it (0: the ODE).

    noisy [B]: which rows are sampled at all (all, if not given). Raises TypeError where the policy predicts something
    else than the sampler needs.
    """
    if isinstance(sampler, Diffusion):
        if not isinstance(policy, PredictsNoise):
            raise TypeError(f"Diffusion needs a policy that predicts noise, {type(policy).__name__} does not")
        grid = sampler.grid
        step = ddpm.denoise(x, policy.noise(context, x, grid.timesteps[index]), grid, index)
        return ddpm.with_floor(step, sampler.floor)
    sigmas = schedules.linspace_grid(sampler.steps)
    now, following = sigmas[index], sigmas[index + 1]
    time = now.to(x)
    if isinstance(sampler, LearnedNoise):
        if not isinstance(policy, LearnsNoise):
            raise TypeError(f"LearnedNoise needs a policy with a noise head, {type(policy).__name__} has none")
        velocity, raw = policy.velocity_and_noise(context, x, time)
        std = chains.bounded_std(raw, sampler.low, sampler.high)
        return chains.learned_noise(x, velocity, now, following, std=std, clip=sampler.mean_clip)
    if not isinstance(policy, PredictsVelocity):
        raise TypeError(f"FlowSteps needs a policy that predicts velocity, {type(policy).__name__} does not")
    level = (torch.ones(len(x)) if noisy is None else noisy).double() * sampler.noise_level
    velocity = policy.velocity(context, x, time)
    if sampler.kernel == "flow_cps":
        return kernels.flow_cps(x, velocity, now, following, noise_level=level)
    return kernels.flow_sde(x, velocity, now, following, noise_level=level, sigma_max=sigmas[1])


@torch.no_grad()
def sample(
    policy: Policy, sampler: Sampler, context: Batch, random: ChunkNoise, *, frozen: Frozen | None = None
) -> Sample:
    """B chunks and the record that `replay` scores again.

    Raises ValueError where a `Diffusion` sampler trains only its last steps and nobody is there for the first.
    """
    start = random.noise.to(next(iter(context.values())).device)
    batch = len(random.noisy)
    first = _first_steps(sampler, frozen)

    def step(k: int, x: Tensor) -> Transition:
        who, seen = frozen if frozen is not None and k < first else (policy, context)
        return transition(who, sampler, seen, x, torch.full((batch,), k), random.noisy[:, k])

    clips = (None, None) if isinstance(sampler, FlowSteps) else (sampler.noise_clip, sampler.last_clip)
    chain = chains.sample_chain(step, start[:, 0], start[:, 1:], noise_clip=clips[0], last_clip=clips[1])
    index = random.noisy.nonzero()[:, 1].view(batch, -1)
    rows, place = torch.arange(batch, device=start.device)[:, None], index.to(start.device)
    states, following = chain.states[rows, place], chain.states[rows, place + 1]
    log_prob = _score(sampler, states, following, chain.means[rows, place], chain.stds[rows, place])
    return Sample(chain.states[:, -1], states, following, index, log_prob)


def replay(
    policy: Policy, sampler: Sampler, context: Batch, states: Tensor, next_states: Tensor, step_index: Tensor
) -> Replay:
    """The record of a `Sample` (any rows of it) under the policy as it is now; the context was encoded once."""
    device = next(iter(context.values())).device
    states, next_states = states.to(device), next_states.to(device)
    places = step_index.cpu().unbind(1)
    steps = [transition(policy, sampler, context, states[:, n], at) for n, at in enumerate(places)]
    means, stds = torch.stack([s.mean for s in steps], 1), torch.stack([s.std for s in steps], 1)
    return Replay(_score(sampler, states, next_states, means, stds), means, stds.expand(means.shape))


@torch.no_grad()
def act(
    policy: Policy, sampler: Sampler | Direct, context: Batch, noise: Tensor, *, frozen: Frozen | None = None
) -> Tensor:
    """The chunk [B, H, A] without exploration, from noise [B, H, A], which stays random: for evaluation.

    A flow policy follows its ODE, a diffusion policy its chain with eta = 0 (DPPO evaluates DDIM so, and DDPM with a
    std of 1e-3 at least), in the sampler's steps, with its clips; a policy that says its chunk outright needs no noise.
    frozen as in `sample`.
    """
    if isinstance(sampler, Direct):
        if not isinstance(policy, PredictsChunk):
            raise TypeError(f"Direct needs a policy that predicts a chunk, {type(policy).__name__} does not")
        return policy.chunk(context)
    x = noise.to(next(iter(context.values())).device)
    first = _first_steps(sampler, frozen)
    sigmas = schedules.linspace_grid(sampler.steps)
    for k in range(sampler.steps):
        who, seen = frozen if frozen is not None and k < first else (policy, context)
        index = torch.full((len(x),), k)
        if isinstance(sampler, Diffusion):
            if not isinstance(who, PredictsNoise):
                raise TypeError(f"Diffusion needs a policy that predicts noise, {type(who).__name__} does not")
            grid = sampler.grid
            x = ddpm.denoise(x, who.noise(seen, x, grid.timesteps[index]), grid, index, eta=0.0).mean
            continue
        if not isinstance(who, PredictsVelocity):
            raise TypeError(f"a flow sampler needs a policy that predicts velocity, {type(who).__name__} does not")
        x = kernels.ode(x, who.velocity(seen, x, sigmas[index].to(x)), sigmas[index], sigmas[index + 1]).mean
        if isinstance(sampler, LearnedNoise) and sampler.mean_clip is not None:
            x = x.clamp(-sampler.mean_clip, sampler.mean_clip)
    last_clip = None if isinstance(sampler, FlowSteps) else sampler.last_clip
    return x if last_clip is None else x.clamp(-last_clip, last_clip)


def _first_steps(sampler: Sampler, frozen: Frozen | None) -> int:
    """How many steps the frozen policy does."""
    first = sampler.steps - sampler.ft_denoising_steps if isinstance(sampler, Diffusion) else 0
    if first and frozen is None:
        raise ValueError(
            f"the first {first} of {sampler.steps} denoising steps are those of the frozen policy: pass it"
        )
    return first


def _score(sampler: Sampler, states: Tensor, next_states: Tensor, means: Tensor, stds: Tensor) -> Tensor:
    if isinstance(sampler, LearnedNoise):
        chain = Chain(torch.cat([states, next_states[:, -1:]], 1), means, stds)
        return chains.chain_log_prob(chain, initial=sampler.initial, reduction=sampler.reduction)[:, None]
    return chains.element_log_prob(next_states, means, stds)
