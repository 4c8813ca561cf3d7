"""DPM-Solver++ (arXiv 2211.01095, alg. 2) on the straight path: the multistep solver of deterministic tails.

With alpha = 1 - sigma, lambda = ln(alpha / sigma) and h = lambda' - lambda (a prime: the next level), a step is

    x' = (sigma' / sigma) x + alpha' (1 - e^-h) x0_hat + corrections by earlier predictions of x0,

e^-h = sigma' alpha / (sigma alpha') having the finite limit 0 at sigma = 1 and at sigma' = 0. MixGRPO-Flash
(arXiv 2507.21802) takes its compressed tail by the second order, "midpoint".

Shapes: x, velocity [B, ...]; levels are floats or [] and common to the batch. float32 (float64 if x or velocity is).
Raised everywhere: ValueError where not 1 >= sigma > sigma_next >= 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genrl.mdp.kernels import Transition, compute_dtype

Correction = Literal["midpoint", "heun"]


class Prediction(NamedTuple):
    """What the model predicted at an earlier level: x0_hat = x - sigma v, [B, ...]."""

    clean: Tensor
    sigma: float


def predict(x: Tensor, velocity: Tensor, sigma: Tensor | float) -> Prediction:
    """The prediction of x0 at this level, [B, ...], to be part of the history of later steps."""
    dtype = compute_dtype(x, velocity)
    return Prediction(x.to(dtype) - float(sigma) * velocity.to(dtype), float(sigma))


def dpm_solver(
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    history: Sequence[Prediction] = (),
    *,
    correction: Correction = "midpoint",
    stochastic: bool = False,
) -> Transition:
    """One step of DPM-Solver++ from x [B, ...], of the order that the history gives: none 1, one prediction 2, two 3.

    history: predictions at the levels just before, oldest first, at most two. The step to sigma_next = 0 is of first
    order (its h is infinite): it returns x0_hat. First order is the Euler step of the ODE, exactly.
    stochastic: SDE-DPM-Solver++, of order 1 or 2, a Gaussian transition of std `sigma' sqrt(1 - e^-2h)`; of order 1 it
    is `kernels.flow_ddim` at level 1. Otherwise the std is 0.
    """
    now, then = float(sigma), float(sigma_next)
    if not 0 <= then < now <= 1:
        raise ValueError(f"a solver step must go from 1 >= sigma to a smaller sigma_next >= 0, got {now} and {then}")
    if len(history) > (1 if stochastic else 2):
        raise ValueError(f"orders up to 3 exist (2 with noise), got a history of {len(history)} predictions")
    clean = predict(x, velocity, now).clean
    decay_h = then * (1.0 - now) / (now * (1.0 - then)) if then < 1 else 1.0  # e^-h
    decay = decay_h**2 if stochastic else decay_h
    gain = (1.0 - then) * (1.0 - decay)
    mean = then / now * (decay_h if stochastic else 1.0) * x.to(clean) + gain * clean
    if history and then > 0:
        h = _log_snr(then) - _log_snr(now)
        first = _slope(clean, now, history[-1], h)
        rate = 2.0 * h if stochastic else h
        linear = (1.0 - then) * (1.0 - (1.0 - decay) / rate)
        if len(history) == 1:
            mean = mean + (0.5 * gain if correction == "midpoint" else linear) * first
        else:
            second = _slope(history[-1].clean, history[-1].sigma, history[-2], h)
            near, far = _step(now, history[-1].sigma) / h, _step(history[-1].sigma, history[-2].sigma) / h
            # A prediction at sigma = 1 is infinitely far in lambda, and so has no say.
            share = near / (near + far) if math.isfinite(far) else 0.0
            curve = (first - second) / (near + far)
            quadratic = (1.0 - then) * ((decay - 1.0 + h) / h**2 - 0.5)
            mean = mean + linear * (first + share * (first - second)) - quadratic * curve
    std = then * math.sqrt(1.0 - decay) if stochastic else 0.0
    return Transition(mean, torch.full((len(x), *[1] * (x.dim() - 1)), std, dtype=mean.dtype, device=mean.device))


def solve(
    velocity: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    sigmas: Tensor,
    previous: Prediction | None = None,
) -> Tensor:
    """Take x [B, ...] from sigmas[0] to sigmas[-1] by the second order (alg. 2), one call of `velocity(x, sigma)` per
    step.

    sigmas: [n + 1], decreasing. previous: the prediction of the step before; None = begin with a first-order step.
    """
    history = [] if previous is None else [previous]
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        predicted = velocity(x, sigma)
        now = predict(x, predicted, sigma)
        x = dpm_solver(x, predicted, sigma, sigma_next, history).mean
        # Second order reads one prediction: older ones would make it a third-order step.
        history = [now]
    return x


def _log_snr(sigma: float) -> float:
    return math.log((1.0 - sigma) / sigma) if sigma < 1 else -math.inf


def _step(sigma: float, earlier: float) -> float:
    return _log_snr(sigma) - _log_snr(earlier)


def _slope(clean: Tensor, sigma: float, earlier: Prediction, h: float) -> Tensor:
    """`(x0_hat - x0_hat before) h / h_before`: 0 where the earlier level is 1, infinitely far in lambda."""
    return (clean - earlier.clean) * (h / _step(sigma, earlier.sigma))
