"""Noise grids that diffusers' schedulers make, and the times that the released trainers tell their models."""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.mdp.schedules import shift


def dynamic_mu(
    tokens: int,
    *,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    base_tokens: int = 256,
    max_tokens: int = 4096,
) -> float:
    """mu of the dynamic shift, linear in the packed latent tokens. Defaults: FLUX.1 (Qwen-Image: .9 at 8192)."""
    return base_shift + (tokens - base_tokens) * (max_shift - base_shift) / (max_tokens - base_tokens)


def shifted_grid(steps: int, factor: float, *, terminal: float | None = None) -> Tensor:
    """`shift(1, (N-1)/N, ..., 1/N), 0`: FLUX, Qwen-Image, Flow-Factory, DanceGRPO, MixGRPO.

    factor: static shift, exp(mu) or mu (see `shift`). terminal: the last value before 0, to which the others are
    stretched, `q -> 1 - (1 - q)(1 - terminal) / (1 - q_last)`.
    """
    sigmas = shift(torch.linspace(1.0, 1.0 / _steps(steps), steps, dtype=torch.float64), factor)
    return _closed(sigmas if terminal is None else 1.0 - (1.0 - sigmas) * (1.0 - terminal) / (1.0 - sigmas[-1]))


def sd3_grid(steps: int, factor: float = 3.0, *, train_timesteps: int = 1000) -> Tensor:
    """The grid of diffusers' flow-match Euler scheduler given only a number of steps (SD3, as in Flow-GRPO).

    Its lower end is shifted twice (huggingface/diffusers issue 13243): the last non-zero value is .00893 for every N.
    """
    lowest = float(shift(torch.tensor(1.0 / train_timesteps, dtype=torch.float64), factor))
    return _closed(shift(torch.linspace(1.0, lowest, _steps(steps), dtype=torch.float64), factor))


def unipc_flow_grid(steps: int, factor: float = 3.0, *, train_timesteps: int = 1000) -> Tensor:
    """diffusers' UniPC flow grid (Wan): N of N + 1 even values from 1 to 1/1000, shifted; starts at 1 - 1e-6."""
    sigmas = shift(torch.linspace(1.0, 1.0 / train_timesteps, _steps(steps) + 1, dtype=torch.float64)[:-1], factor)
    sigmas[0] -= 1e-6
    return _closed(sigmas)


def is_truncated(sigmas: Tensor, times: Tensor, *, train_timesteps: int = 1000) -> bool:
    """Are these the times fed to the denoiser by UniPC, DanceGRPO and MixGRPO: `1000 sigma` truncated, without the 0?

    They lie up to .001 away from the sigma of the step. Next to a whole number, float32 falls on either side of it.
    """
    exact, whole = sigmas[:-1].double() * train_timesteps, times.double().round()
    near = ((exact - 1e-3).floor() <= whole) & (whole <= (exact + 1e-3).floor())
    return times.shape == exact.shape and bool(near.all() and (times - whole).abs().max() < 1e-3)


def _steps(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"a grid needs at least one step, got {steps}")
    return steps


def _closed(sigmas: Tensor) -> Tensor:
    return torch.cat([sigmas, sigmas.new_zeros(1)]).float()
