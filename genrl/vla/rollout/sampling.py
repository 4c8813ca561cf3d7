"""Sampling chunks from a policy, and scoring them again: one transition rule for both, by kind of sampler.

Of a chunk's K denoising steps N are kept: those that are scored. A record is [B, N, ...] states, the states that
followed, and the number of the step (`step_index`); K + 1 states are in it only where all were sampled.
Log-probabilities are per element, [B, M, H, A]: M = N where every step is a decision (`FlowSteps`,
`Diffusion`), M = 1 where the chain is one (`LearnedNoise`). `chains.executed` and `chains.aggregate` make ratios of
them.

A policy without denoising makes its chunk in one step: `Tokens` draws each number, N = M = 1, and what followed is the
tokens, int64; `Regression` draws nothing, and only `act` takes it.

On the rows it was sampled with, `replay` computes what `sample` did, bit for bit; on other batches a matrix product may
round differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from genrl.mdp import chains, ddpm, kernels, levels
from genrl.mdp.chains import Chain
from genrl.mdp.kernels import Reduction, Transition
from genrl.vla.policies.policy import (
    Batch,
    LearnsNoise,
    Policy,
    PredictsActions,
    PredictsNoise,
    PredictsTokens,
    PredictsVelocity,
)


class ChunkNoise(NamedTuple):
    """All that is random in B chunks: noise [B, K + 1, H, A], the initial one first; noisy bool [B, K], see `kept`."""

    noise: Tensor
    noisy: Tensor


class Sample(NamedTuple):
    """chunk [B, H, A], normalised; states, next_states [B, N, H, A]; step_index [B, N]; log_prob [B, M, H, A]. Of
    `Tokens`, states are 0."""

    chunk: Tensor
    states: Tensor
    next_states: Tensor
    step_index: Tensor
    log_prob: Tensor


class Replay(NamedTuple):
    """log_prob [B, M, H, A], entropy [B, N, H, A] in nats; of denoising, means and stds [B, N, H, A] of the scored
    steps; of tokens, log-probabilities [B, 1, H, A, K] of all. All with gradients."""

    log_prob: Tensor
    entropy: Tensor
    means: Tensor | None = None
    stds: Tensor | None = None
    every: Tensor | None = None


class Acting(NamedTuple):
    """A policy with the sampler it acts by, and, of DPPO, the policy that does the first denoising steps."""

    policy: Any
    sampler: Any
    frozen: Any = None


class Frozen(NamedTuple):
    """The policy before fine-tuning, and its context of the same observations: who does DPPO's first steps."""

    policy: Policy
    context: Batch


class Sampler(ABC):
    """How a policy's chunks come about: drawn and recorded, scored again, or without exploration."""

    steps: int = 1

    def noise(
        self, policy: Policy, generators: Sequence[torch.Generator], shared: torch.Generator | None = None
    ) -> ChunkNoise:
        """What chunk i needs, from generator i alone; `shared` chooses the step of "random_per_batch"."""
        shape = (self.steps + 1, policy.horizon, policy.action_dim)
        numbers = torch.stack([torch.randn(shape, generator=rng) for rng in generators])
        return ChunkNoise(numbers, self._noisy(generators, shared))

    def _noisy(self, generators: Sequence[torch.Generator], shared: torch.Generator | None) -> Tensor:
        """Which steps are sampled, bool [B, K]: all, where a sampler does not choose."""
        return torch.ones(len(generators), self.steps, dtype=torch.bool)

    def sample(self, policy: Policy, context: Batch, random: ChunkNoise, *, frozen: Frozen | None = None) -> Sample:
        """B chunks and the record that `replay` scores again, without gradients.

        Raises ValueError where a `Diffusion` sampler trains only its last steps and nobody is there for the first.
        """
        raise TypeError(f"{type(self).__name__} draws nothing, so there is nothing to record or to score: use Tokens")

    def replay(self, policy: Policy, context: Batch, states: Tensor, next_states: Tensor, step_index: Tensor) -> Replay:
        """The record of a `Sample` (any rows of it) under the policy as it is now; the context was encoded once."""
        raise TypeError(f"{type(self).__name__} draws nothing, so there is nothing to record or to score: use Tokens")

    @abstractmethod
    def act(self, policy: Policy, context: Batch, noise: Tensor, *, frozen: Frozen | None = None) -> Tensor:
        """The chunk [B, H, A] without exploration, from noise [B, H, A], which stays random: for evaluation.

        Of tokens the likeliest are taken. A flow policy follows its ODE, a diffusion policy its chain with eta = 0
        (DPPO evaluates DDIM so, and DDPM with a std of 1e-3 at least), in the sampler's steps, with its clips. frozen
        as in `sample`.
        """


class Denoising(Sampler):
    """Samplers of policies that denoise: a chain of `steps`, of which some are sampled and scored."""

    first: int = 0
    """Steps that the policy before fine-tuning does."""
    mean_clip: float | None = None
    noise_clip: float | None = None
    last_clip: float | None = None

    @abstractmethod
    def transition(
        self, policy: Policy, context: Batch, x: Tensor, index: Tensor, noisy: Tensor | None = None
    ) -> Transition:
        """The step `index` [B] of each row from x [B, H, A]: mean [B, H, A], std broadcastable to it (0: the ODE).

        noisy [B]: which rows are sampled at all (all, if not given). Raises TypeError where the policy predicts
        something else than the sampler needs.
        """

    @torch.no_grad()
    def sample(self, policy: Policy, context: Batch, random: ChunkNoise, *, frozen: Frozen | None = None) -> Sample:
        """See `Sampler`."""
        # Drawn on the CPU, so that a chunk is the same on every device.
        start, batch = random.noise.to(next(iter(context.values())).device), len(random.noisy)
        self._check_first(frozen)

        def step(k: int, x: Tensor) -> Transition:
            who, encoded = frozen if frozen is not None and k < self.first else (policy, context)
            return self.transition(who, encoded, x, torch.full((batch,), k), random.noisy[:, k])

        chain = chains.sample_chain(
            step, start[:, 0], start[:, 1:], noise_clip=self.noise_clip, last_clip=self.last_clip
        )
        # Rows have equally many noisy steps, if not the same ones.
        index = random.noisy.nonzero()[:, 1].view(batch, -1)
        rows, place = torch.arange(batch, device=start.device)[:, None], index.to(start.device)
        states, following = chain.states[rows, place], chain.states[rows, place + 1]
        # By the same function as in `replay`, on the same tensors: the first ratio is exactly 1.
        log_prob = self._score(states, following, chain.means[rows, place], chain.stds[rows, place])
        return Sample(chain.states[:, -1], states, following, index, log_prob)

    def replay(self, policy: Policy, context: Batch, states: Tensor, next_states: Tensor, step_index: Tensor) -> Replay:
        """See `Sampler`."""
        device = next(iter(context.values())).device
        states, next_states = states.to(device), next_states.to(device)
        places = step_index.cpu().unbind(1)
        steps = [self.transition(policy, context, states[:, n], at) for n, at in enumerate(places)]
        means, stds = torch.stack([s.mean for s in steps], 1), torch.stack([s.std for s in steps], 1)
        stds = stds.expand(means.shape)
        return Replay(self._score(states, next_states, means, stds), chains.entropy(stds), means, stds)

    @torch.no_grad()
    def act(self, policy: Policy, context: Batch, noise: Tensor, *, frozen: Frozen | None = None) -> Tensor:
        """See `Sampler`."""
        x = noise.to(next(iter(context.values())).device)
        self._check_first(frozen)
        for k in range(self.steps):
            who, encoded = frozen if frozen is not None and k < self.first else (policy, context)
            x = self._follow(who, encoded, x, torch.full((len(x),), k))
        return x if self.last_clip is None else x.clamp(-self.last_clip, self.last_clip)

    def _follow(self, policy: Policy, context: Batch, x: Tensor, index: Tensor) -> Tensor:
        """The step without noise: of a flow, one of Euler's along its ODE."""
        if not isinstance(policy, PredictsVelocity):
            raise TypeError(f"a flow sampler needs a policy that predicts velocity, {type(policy).__name__} does not")
        sigmas = levels.linspace_grid(self.steps)
        x = kernels.ode(x, policy.velocity(context, x, sigmas[index].to(x)), sigmas[index], sigmas[index + 1]).mean
        return x if self.mean_clip is None else x.clamp(-self.mean_clip, self.mean_clip)

    def _score(self, states: Tensor, next_states: Tensor, means: Tensor, stds: Tensor) -> Tensor:
        """Log-probabilities [B, M, H, A]: one of each step."""
        return chains.element_log_prob(next_states, means, stds)

    def _check_first(self, frozen: Frozen | None) -> None:
        if self.first and frozen is None:
            raise ValueError(
                f"the first {self.first} of {self.steps} denoising steps are those of the frozen policy: pass it"
            )


@dataclass(frozen=True)
class FlowSteps(Denoising):
    """Flow-SDE (pi_RL) or Flow-CPS: the steps of `selection` are sampled (`chains.noisy_steps`), others are the ODE.

    noise_level: .5 in pi_RL; a small policy needs 1, for the later ODE steps contract the noise of the earlier ones.
    Two steps at least; the last of Flow-CPS is deterministic, so that it is never sampled.
    """

    kernel: Literal["flow_sde", "flow_cps"] = "flow_sde"
    steps: int = 4
    noise_level: float = 1.0
    selection: chains.Selection = "random_per_env"

    def __post_init__(self) -> None:
        if self.steps < 2 or self.noise_level <= 0:
            raise ValueError(f"need 2 steps and a positive noise level, got {self.steps} and {self.noise_level}")

    def _noisy(self, generators: Sequence[torch.Generator], shared: torch.Generator | None) -> Tensor:
        """Steps of `selection`: by each chunk's own generator, or the same ones for all."""

        def choose(rows: int, rng: torch.Generator | None) -> Tensor:
            skip = self.kernel == "flow_cps"
            return chains.noisy_steps(self.selection, rows, self.steps, skip_last=skip, generator=rng)

        # One choice per chunk, by its own generator, so that it is the same in any batch.
        if self.selection == "random_per_env":
            return torch.cat([choose(1, rng) for rng in generators])
        return choose(len(generators), shared)

    def transition(
        self, policy: Policy, context: Batch, x: Tensor, index: Tensor, noisy: Tensor | None = None
    ) -> Transition:
        """See `Denoising`."""
        if not isinstance(policy, PredictsVelocity):
            raise TypeError(f"FlowSteps needs a policy that predicts velocity, {type(policy).__name__} does not")
        sigmas = levels.linspace_grid(self.steps)
        now, following = sigmas[index], sigmas[index + 1]
        # Rows of one call differ in which step is noisy, and a step of level 0 is that of the ODE.
        level = (torch.ones(len(x)) if noisy is None else noisy).double() * self.noise_level
        velocity = policy.velocity(context, x, now.to(x))
        if self.kernel == "flow_cps":
            return kernels.flow_cps(x, velocity, now, following, noise_level=level)
        return kernels.flow_sde(x, velocity, now, following, noise_level=level, sigma_max=sigmas[1])


@dataclass(frozen=True)
class LearnedNoise(Denoising):
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

    def transition(
        self, policy: Policy, context: Batch, x: Tensor, index: Tensor, noisy: Tensor | None = None
    ) -> Transition:
        """See `Denoising`."""
        if not isinstance(policy, LearnsNoise):
            raise TypeError(f"LearnedNoise needs a policy with a noise head, {type(policy).__name__} has none")
        sigmas = levels.linspace_grid(self.steps)
        velocity, raw = policy.velocity_and_noise(context, x, sigmas[index].to(x))
        std = chains.bounded_std(raw, self.low, self.high)
        return chains.learned_noise(x, velocity, sigmas[index], sigmas[index + 1], std=std, clip=self.mean_clip)

    def _score(self, states: Tensor, next_states: Tensor, means: Tensor, stds: Tensor) -> Tensor:
        """One log-probability of the whole chain, [B, 1, H, A]."""
        # All steps were sampled, so each next state is the state of the step after it.
        chain = Chain(torch.cat([states, next_states[:, -1:]], 1), means, stds)
        return chains.chain_log_prob(chain, initial=self.initial, reduction=self.reduction)[:, None]


@dataclass(frozen=True)
class Diffusion(Denoising):
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

    @property
    def first(self) -> int:  # type: ignore[override]
        """See `Denoising`."""
        return self.steps - self.ft_denoising_steps

    def _noisy(self, generators: Sequence[torch.Generator], shared: torch.Generator | None) -> Tensor:
        """The last steps, which are trained."""
        return ddpm.fine_tuned(torch.arange(self.steps), self.steps, self.ft_denoising_steps).expand(
            len(generators), -1
        )

    def transition(
        self, policy: Policy, context: Batch, x: Tensor, index: Tensor, noisy: Tensor | None = None
    ) -> Transition:
        """See `Denoising`."""
        return ddpm.with_floor(self._denoised(policy, context, x, index), self.floor)

    def _follow(self, policy: Policy, context: Batch, x: Tensor, index: Tensor) -> Tensor:
        """DDIM's step with eta = 0."""
        return self._denoised(policy, context, x, index, eta=0.0).mean

    def _denoised(self, policy: Policy, context: Batch, x: Tensor, index: Tensor, **how: float) -> Transition:
        if not isinstance(policy, PredictsNoise):
            raise TypeError(f"Diffusion needs a policy that predicts noise, {type(policy).__name__} does not")
        grid = self.grid
        return ddpm.denoise(x, policy.noise(context, x, grid.timesteps[index]), grid, index, **how)


@dataclass(frozen=True)
class Tokens(Sampler):
    """Every number of a chunk is a token, drawn from `softmax(logits / temperature)` (SimpleVLA-RL, arXiv 2509.09674:
    1.6). Scored at the same temperature; evaluation takes the likeliest."""

    temperature: float = 1.0

    @torch.no_grad()
    def sample(self, policy: Policy, context: Batch, random: ChunkNoise, *, frozen: Frozen | None = None) -> Sample:
        """See `Sampler`; the noise decides."""
        noise = random.noise[:, -1].to(next(iter(context.values())).device)
        chooser, every = _chooser(policy), self._log_probs(policy, context)
        tokens = chains.draw_tokens(every, noise)
        log_prob = chains.chosen_log_prob(every, tokens)[:, None]
        index = torch.zeros(len(noise), 1, dtype=torch.int64)
        chunk = chooser.centres.to(noise)[tokens]
        return Sample(chunk, torch.zeros_like(log_prob), tokens[:, None], index, log_prob)

    def replay(self, policy: Policy, context: Batch, states: Tensor, next_states: Tensor, step_index: Tensor) -> Replay:
        """See `Sampler`."""
        every = self._log_probs(policy, context)
        tokens = next_states[:, 0].to(every.device)
        chosen, entropy = chains.chosen_log_prob(every, tokens), chains.token_entropy(every)
        return Replay(chosen[:, None], entropy[:, None], every=every[:, None])

    @torch.no_grad()
    def act(self, policy: Policy, context: Batch, noise: Tensor, *, frozen: Frozen | None = None) -> Tensor:
        """See `Sampler`."""
        chooser = _chooser(policy)
        logits = chooser.logits(context)
        return chooser.centres.to(logits)[logits.argmax(-1)]

    def _log_probs(self, policy: Policy, context: Batch) -> Tensor:
        """Log-probabilities of all tokens, [B, H, A, K]."""
        return chains.token_log_probs(_chooser(policy).logits(context), self.temperature)


@dataclass(frozen=True)
class Regression(Sampler):
    """The chunk that the policy computes: evaluation alone, since nothing is drawn."""

    @torch.no_grad()
    def act(self, policy: Policy, context: Batch, noise: Tensor, *, frozen: Frozen | None = None) -> Tensor:
        """See `Sampler`."""
        if not isinstance(policy, PredictsActions):
            raise TypeError(f"Regression needs a policy that computes its actions, {type(policy).__name__} does not")
        return policy.regressed(context)


def _chooser(policy: Policy) -> PredictsTokens:
    if not isinstance(policy, PredictsTokens):
        raise TypeError(f"Tokens needs a policy that predicts tokens, {type(policy).__name__} does not")
    return policy
