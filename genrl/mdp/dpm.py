"""DPM-Solver++ (arXiv 2211.01095, alg. 2) on the straight path: the multistep solver of deterministic tails.

With alpha = 1 - sigma, lambda = ln(alpha / sigma) and h = lambda' - lambda (a prime: the next level), a step is

    x' = (sigma' / sigma) x + alpha' (1 - e^-h) x0_hat + a correction by the prediction of x0 before,

e^-h = sigma' alpha / (sigma alpha') having the finite limit 0 at sigma = 1 and at sigma' = 0. MixGRPO-Flash
(arXiv 2507.21802) takes its compressed tail by the second order, "midpoint".

Shapes: x, velocity [B, ...]; levels are floats or [] and common to the batch. float32 (float64 if x or velocity is).
Raised everywhere: ValueError where not 1 >= sigma > sigma_next >= 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from genrl.mdp.kernels import compute_dtype


class Prediction(NamedTuple):
    """What the model predicted at an earlier level: x0_hat = x - sigma v, [B, ...]."""

    clean: Tensor
    sigma: float


def predict(x: Tensor, velocity: Tensor, sigma: Tensor | float) -> Prediction:
    """The prediction of x0 at this level, [B, ...], for the step after this one."""
    dtype = compute_dtype(x, velocity)
    return Prediction(x.to(dtype) - float(sigma) * velocity.to(dtype), float(sigma))


def dpm_step(
    x: Tensor, velocity: Tensor, sigma: Tensor | float, sigma_next: Tensor | float, previous: Prediction | None = None
) -> Tensor:
    """The next state [B, ...] by one step of DPM-Solver++ from x [B, ...]: of first order, which is the Euler step of
    the ODE, exactly, or of second with the prediction at the level before. A step to sigma_next = 0 is of first order
    (its h is infinite): it returns x0_hat."""
    now, then = float(sigma), float(sigma_next)
    if not 0 <= then < now <= 1:
        raise ValueError(f"a solver step must go from 1 >= sigma to a smaller sigma_next >= 0, got {now} and {then}")
    clean = predict(x, velocity, now).clean
    gain = (1.0 - then) * (1.0 - then * (1.0 - now) / (now * (1.0 - then)))  # alpha' (1 - e^-h)
    following = then / now * x.to(clean) + gain * clean
    if previous is not None and then > 0:
        # x0_hat as it changes over this step: 0 where the earlier level is 1, infinitely far in lambda.
        shares = (_log_snr(then) - _log_snr(now)) / (_log_snr(now) - _log_snr(previous.sigma))
        following = following + 0.5 * gain * ((clean - previous.clean) * shares)
    return following


def solve(velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigmas: Tensor) -> Tensor:
    """Take x [B, ...] from sigmas[0] to sigmas[-1] by the second order (alg. 2), after a first step of first order; one
    call of `velocity(x, sigma)` per step. sigmas: [n + 1], decreasing."""
    previous = None
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        predicted = velocity(x, sigma)
        now = predict(x, predicted, sigma)
        x = dpm_step(x, predicted, sigma, sigma_next, previous)
        previous = now
    return x


def _log_snr(sigma: float) -> float:
    return math.log((1.0 - sigma) / sigma) if sigma < 1 else -math.inf
