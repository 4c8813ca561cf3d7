"""The noise grid of the released trainers, and the times that they tell their models."""

from __future__ import annotations

import torch
from torch import Tensor


def shifted_grid(steps: int, factor: float) -> Tensor:
    """`s u / (1 + (s - 1) u)` of 1, (N-1)/N, ..., 1/N, then 0, s = factor (arXiv 2403.03206, eq. 23): FLUX, Qwen-Image,
    Flow-Factory, DanceGRPO, MixGRPO."""
    even = torch.linspace(1.0, 1.0 / steps, steps, dtype=torch.float64)
    sigmas = factor * even / (1.0 + (factor - 1.0) * even)
    return torch.cat([sigmas, sigmas.new_zeros(1)]).float()


def is_truncated(sigmas: Tensor, times: Tensor, *, train_timesteps: int = 1000) -> bool:
    """Are these the times fed to the denoiser by UniPC, DanceGRPO and MixGRPO: `1000 sigma` truncated, without the 0?

    They lie up to .001 away from the sigma of the step. Next to a whole number, float32 falls on either side of it.
    """
    exact, whole = sigmas[:-1].double() * train_timesteps, times.double().round()
    near = ((exact - 1e-3).floor() <= whole) & (whole <= (exact + 1e-3).floor())
    return times.shape == exact.shape and bool(near.all() and (times - whole).abs().max() < 1e-3)
