"""Denoising chains of action chunks: which steps are sampled, what the chain's log-probability is, and at which level.

A chain holds K + 1 states from noise (sigma = 1) to the action chunk (sigma = 0): states [B, K + 1, H, D] for a horizon
of H actions of D numbers, its K transitions N(mean, std^2 I). The kernels are `kernels.flow_sde` (pi_RL's Flow-SDE),
`kernels.flow_cps`, `learned_noise` (Flow-Noise, ReinFlow) and `ddpm.denoise` (DPPO). Policies are told sigma; those
whose time runs from noise at 0 to action at 1 are reversed once, by `noise_at_zero`.

Two readings of a chain (pi_RL, arXiv 2510.25889, section 3): every sampled step is a decision with a ratio of its own
(two layers: Flow-SDE, DPPO), or the chain is one action whose log-probability is that of all its terms (one layer:
Flow-Noise, ReinFlow). Log-probabilities here stay per element [B, ..., H, D] until `executed` and `aggregate`.

Last the actions that are chosen among K tokens each, by logits [..., K].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genrl.mdp import kernels
from genrl.mdp.kernels import Scalar, Transition

Velocity = Callable[[Tensor, Tensor], Tensor]
Selection = Literal["all", "random_per_env", "random_per_batch", "last"]
Level = Literal["chunk", "action", "element"]


class Chain(NamedTuple):
    """states [B, K + 1, ...], noisiest first; means [B, K, ...] and stds, broadcastable to them (0 = deterministic)."""

    states: Tensor
    means: Tensor
    stds: Tensor


def noise_at_zero(velocity: Velocity) -> Velocity:
    """A policy with noise at time 0 and action at 1 (GR00T, ReinFlow) as one of ours: sigma = 1 - time, v -> -v.

    Both map x [B, ...] and a time (a float, [] or [B]) to a velocity [B, ...].
    """
    return lambda x, sigma: -velocity(x, 1.0 - sigma)


def learned_noise(
    x: Tensor, velocity: Tensor, sigma: Scalar, sigma_next: Scalar, *, std: Tensor, clip: float | None = None
) -> Transition:
    """The Euler step with a std that the policy learns: Flow-Noise of pi_RL (arXiv 2510.25889) and ReinFlow.

    x, velocity, std [B, ...]; for std see `bounded_std`: no factor of the step size, no drift correction. clip: the
    mean is clamped to +-clip (1 in ReinFlow, arXiv 2505.22094, code; None in pi_RL).
    """
    mean = kernels.ode(x, velocity, sigma, sigma_next).mean
    return Transition(mean if clip is None else mean.clamp(-clip, clip), std.to(mean.dtype))


def bounded_std(raw: Tensor, low: float, high: float) -> Tensor:
    """`exp((lo + (hi - lo) (tanh(raw) + 1) / 2) / 2)`, lo = ln low^2, hi = ln high^2: a std in [low, high], any shape.

    The noise head's output in pi_RL ([.08, .16]) and ReinFlow. Raises ValueError unless 0 < low <= high.
    """
    if not 0 < low <= high:
        raise ValueError(f"the bounds of a std must satisfy 0 < low <= high, got {low} and {high}")
    # Between the bounds of the log-variance: an output of 0 is their geometric mean, and no output leaves them.
    lowest, highest = 2.0 * math.log(low), 2.0 * math.log(high)
    return torch.exp(0.5 * (lowest + (highest - lowest) * (torch.tanh(raw) + 1.0) / 2.0))


def noisy_steps(
    selection: Selection,
    batch: int,
    steps: int,
    *,
    count: int = 1,
    skip_last: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Which of the `steps` steps of each row are sampled (the others are ODE steps), bool [batch, steps].

    "all"; "random_per_env": one step, uniform, for each row of its own; "random_per_batch": one for all rows, as
    released by pi_RL, which makes the gradients of a batch correlated; "last": the last `count`, whose noise a unimodal
    policy contracts least. skip_last leaves the step to sigma = 0 out. Multiply by a noise level: kernels take one per
    row, and at level 0 Flow-SDE and CPS are the ODE exactly.
    Raises ValueError where that leaves no step, or where a random choice has no generator.
    """
    eligible = steps - int(skip_last)
    if eligible < 1 or not 1 <= count <= eligible:
        raise ValueError(f"{count} of {eligible} steps cannot be stochastic ({steps} steps, skip_last {skip_last})")
    noisy = torch.zeros(batch, steps, dtype=torch.bool)
    if selection == "all":
        noisy[:, :eligible] = True
    elif selection == "last":
        noisy[:, eligible - count : eligible] = True
    elif selection in ("random_per_env", "random_per_batch"):
        if generator is None:
            raise ValueError(f"{selection!r} chooses steps at random: pass a generator")
        rows = batch if selection == "random_per_env" else 1
        chosen = torch.randint(eligible, (rows, 1), generator=generator).expand(batch, 1)
        noisy.scatter_(1, chosen, True)
    else:
        raise ValueError(f"selection must be 'all', 'random_per_env', 'random_per_batch' or 'last', got {selection!r}")
    return noisy


def sample_chain(
    transition: Callable[[int, Tensor], Transition],
    start: Tensor,
    noise: Tensor,
    *,
    noise_clip: float | None = None,
    last_clip: float | None = None,
) -> Chain:
    """K steps of `x' = mean + std noise_k` from start [B, ...]; transition(k, x) is step k, noise standard [B, K, ...].

    noise_clip: noise is clamped to +-noise_clip; last_clip: so is the last state (DPPO and ReinFlow: 3 and 1). Both
    take the sample off the density that scores it: consistent between old and new policy, but no use for a KL.
    """
    states, means, stds = [start], [], []
    clipped = noise if noise_clip is None else noise.clamp(-noise_clip, noise_clip)
    for k in range(noise.shape[1]):
        step = transition(k, states[-1])
        state = kernels.sample(step.mean, step.std, clipped[:, k])
        if last_clip is not None and k == noise.shape[1] - 1:
            state = state.clamp(-last_clip, last_clip)
        states.append(state)
        means.append(step.mean)
        stds.append(step.std)
    return Chain(torch.stack(states, 1), torch.stack(means, 1), torch.stack(stds, 1))


def element_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """`kernels.log_prob` of every element by itself, shape of mean; std broadcastable to it. x is detached.

    Raises ValueError where a std is not positive.
    """
    # One row for each element: `log_prob` reduces every dimension but the first.
    scale = std.expand(mean.shape).reshape(-1, 1)
    return kernels.log_prob(x.reshape(-1, 1), mean.reshape(-1, 1), scale).view(mean.shape)


def chain_log_prob(chain: Chain, *, initial: bool, reduction: kernels.Reduction) -> Tensor:
    """Joint log-density of a chain whose K steps were all sampled, per element [B, H, D].

    `sum_k ln N(x_{k+1}; mean_k, std_k^2)`, with `ln N(x_0; 0, 1)` where `initial` (it cancels in a ratio of sums).
    "sum" is the density, ReinFlow's; "mean" divides by the number of terms, K (+ 1), as pi_RL's Flow-Noise does: the
    ratio is then the joint one to the power of 1 / terms. Gradients flow through means and stds only.
    """
    terms = element_log_prob(chain.states[:, 1:], chain.means, chain.stds)
    if initial:
        first = chain.states[:, :1].to(terms.dtype)
        terms = torch.cat([element_log_prob(first, torch.zeros_like(first), torch.ones_like(first)), terms], 1)
    if reduction == "mean":
        return terms.mean(1)
    if reduction == "sum":
        return terms.sum(1)
    raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")


def entropy(std: Tensor) -> Tensor:
    """`ln(2 pi e s^2) / 2` of a Gaussian element, shape of std, in nats: the bonus of Flow-Noise and ReinFlow.

    ReinFlow's entropy rate is its mean over elements and terms, the initial one (std 1) included.
    """
    return 0.5 * math.log(2.0 * math.pi * math.e) + std.log()


def executed(elements: Tensor, actions: int, width: int) -> Tensor:
    """[..., H, D] -> [..., actions, width]: the part of a chunk that reaches the robot, without horizon and padding."""
    if actions > elements.shape[-2] or width > elements.shape[-1]:
        raise ValueError(f"cannot execute {actions} actions of width {width} of a chunk of {list(elements.shape[-2:])}")
    return elements[..., :actions, :width]


def aggregate(elements: Tensor, level: Level, reduction: kernels.Reduction) -> Tensor:
    """Log-probabilities [B, C, D] at the level of the ratio: "chunk" [B], "action" [B, C], "element" [B, C, D].

    reduction: "sum" (pi_RL, with a clip range of .2) or "mean" (DPPO, with .01): sum and mean are the same method with
    the clip range divided by the number of elements.
    """
    if level == "element":
        return elements
    if level not in ("chunk", "action"):
        raise ValueError(f"level must be 'chunk', 'action' or 'element', got {level!r}")
    rows = elements.flatten(1) if level == "chunk" else elements
    if reduction == "mean":
        return rows.mean(-1)
    if reduction == "sum":
        return rows.sum(-1)
    raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")


def token_log_probs(logits: Tensor, temperature: float) -> Tensor:
    """`log_softmax(logits / temperature)`, float32 whatever the logits are, [..., K]."""
    return torch.log_softmax(logits.float() / temperature, -1)


def draw_tokens(log_prob: Tensor, noise: Tensor) -> Tensor:
    """One of the K tokens for each row, int64 [...]: where its cumulative probability reaches Phi(noise).

    log_prob [..., K] is normalised, noise standard normal [...]: it alone decides, so that a draw can be made again.
    """
    # In float64, and below by the last sum: rounding must not put a share beyond the last token.
    cumulative = log_prob.double().exp().cumsum(-1)
    share = torch.special.ndtr(noise.double()).clamp(min=torch.finfo(torch.float64).tiny)  # 0 is of no token
    return torch.searchsorted(cumulative, share[..., None] * cumulative[..., -1:])[..., 0]


def chosen_log_prob(log_prob: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [...] of the tokens int64 [...], out of [..., K]."""
    return log_prob.gather(-1, tokens[..., None])[..., 0]


def token_entropy(log_prob: Tensor) -> Tensor:
    """`-sum p ln p` in nats, [...]."""
    return -(log_prob.exp() * log_prob).sum(-1)
