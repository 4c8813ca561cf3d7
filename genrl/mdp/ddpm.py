"""DPPO's denoising steps (arXiv 2409.00588): a DDPM or DDIM chain whose last steps are the fine-tuned policy.

Position i of a chain of N steps counts from the noisiest, 0, to the cleanest, N - 1; the network is told
`grid.timesteps[i]`. Only the last `ft_denoising_steps` positions use (and train) the fine-tuned copy, the others the
frozen one. Everything is float64 here and float32 in the transition.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.mdp import kernels
from genrl.mdp.kernels import Transition


class DenoisingGrid(NamedTuple):
    """timesteps int64 [N], descending to 0; alpha_bar and alpha_bar_next float64 [N], at it and at the next one."""

    timesteps: Tensor
    alpha_bar: Tensor
    alpha_bar_next: Tensor


def cosine_alpha_bars(steps: int, *, offset: float = 0.008, largest_beta: float = 0.999) -> Tensor:
    """Cumulative products of 1 - beta for the cosine schedule (arXiv 2102.09672, eq. 17), float64 [steps].

    DPPO's points: steps + 1 values spread over 0 .. steps + 1, so that two neighbours are (steps + 1) / steps apart.
    """
    place = torch.linspace(0.0, steps + 1.0, steps + 1, dtype=torch.float64) / (steps + 1.0)
    curve = torch.cos((place + offset) / (1.0 + offset) * (math.pi / 2.0)) ** 2
    # The cosine ends at 0: a beta of 1 would leave no signal, by whose square root a step divides.
    betas = (1.0 - curve[1:] / curve[:-1]).clamp(0.0, largest_beta)
    return torch.cumprod(1.0 - betas, 0)


def vp_alpha_bars(steps: int, *, lowest: float = 0.1, highest: float = 10.0) -> Tensor:
    """Cumulative products of 1 - beta of the variance-preserving SDE cut into few steps (arXiv 2011.13456, eq. 11),
    float64 [steps].

    `1 - beta_t = exp(-lowest / K - (highest - lowest) (2 t - 1) / (2 K^2))`, t = 1 .. K: arXiv 2112.07804 (appendix B)
    over [0, 1]; the product is `exp(-lowest t / K - (highest - lowest) t^2 / (2 K^2))`. K = 5 in FISOR.
    """
    place = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    return torch.exp(-lowest * place - 0.5 * (highest - lowest) * place**2)


def ddpm_grid(alpha_bars: Tensor) -> DenoisingGrid:
    """All training timesteps of alpha_bars [N], noisiest first; the step from 0 leads to alpha_bar = 1, the data."""
    return _grid(alpha_bars, torch.arange(len(alpha_bars)))


def ddim_grid(alpha_bars: Tensor, steps: int) -> DenoisingGrid:
    """`steps` of the K training timesteps, the "leading" ones 0, r, 2 r, .., r = K // steps, noisiest first.

    alpha_bars [K]; the grid has `steps` entries. Raises ValueError unless 1 <= steps <= K.
    """
    if not 1 <= steps <= len(alpha_bars):
        raise ValueError(f"{steps} steps cannot be taken of {len(alpha_bars)} timesteps")
    return _grid(alpha_bars, torch.arange(steps) * (len(alpha_bars) // steps))


def denoise(
    x: Tensor,
    noise_prediction: Tensor,
    grid: DenoisingGrid,
    index: Tensor | int,
    *,
    eta: float = 1.0,
    clip: float = 1.0,
) -> Transition:
    """The transition of position `index` (one, or one per row [B]) from x [B, ...]: `kernels.ddim` as DPPO has it.

    The predicted action is clamped to +-clip and the noise recomputed from it. eta = 1 on `ddpm_grid` is the posterior
    of DDPM (arXiv 2006.11239, eqs. 6 and 7); eta = 0 and the last step are deterministic, until `with_floor` makes them
    a policy.
    """
    place = torch.as_tensor(index)
    return kernels.ddim(
        x,
        noise_prediction,
        grid.alpha_bar[place],
        grid.alpha_bar_next[place],
        eta=eta,
        prediction_type="epsilon",
        clip_range=clip,
        # So that the clamped action and the noise still add up to x; DDPM's own formula has it so.
        recompute_noise=True,
    )


def ancestral(x: Tensor, noise_prediction: Tensor, grid: DenoisingGrid, index: Tensor | int) -> Transition:
    """DDPM's step with the larger of its two deviations (arXiv 2006.11239, algorithm 2): nothing is clamped,

    mean = (x - beta / sqrt(1 - alpha_bar) eps) / sqrt(1 - beta),    std = sqrt(beta),    0 in the last step.
    """
    place = torch.as_tensor(index)
    bar, following = grid.alpha_bar[place], grid.alpha_bar_next[place]
    beta = 1.0 - bar / following
    shape = (-1, *[1] * (x.dim() - 1))
    scale, keep = ((beta / (1.0 - bar).sqrt()).view(shape).to(x), (1.0 - beta).sqrt().view(shape).to(x))
    std = torch.where(following == 1.0, torch.zeros_like(beta), beta.sqrt())
    return Transition((x - scale * noise_prediction) / keep, std.view(shape).to(x))


def with_floor(step: Transition, lowest: float) -> Transition:
    """std = max(std, lowest), shapes as in `step`: exploration that persists (DPPO: .1 to sample and to score; 1e-3 to
    evaluate).

    With two different floors the log-probability is that of another policy than the one which acted.
    """
    return Transition(step.mean, step.std.clamp(min=lowest))


def fine_tuned(index: Tensor, steps: int, ft_denoising_steps: int) -> Tensor:
    """Whether a position belongs to the fine-tuned copy, bool, shape of index."""
    if not 1 <= ft_denoising_steps <= steps:
        raise ValueError(f"{ft_denoising_steps} of {steps} denoising steps cannot be fine-tuned")
    return index >= steps - ft_denoising_steps


def _grid(alpha_bars: Tensor, ascending: Tensor) -> DenoisingGrid:
    alpha = alpha_bars.double()[ascending]
    # After the step from timestep 0 there is no noise: alpha-bar 1.
    following = torch.cat([alpha.new_ones(1), alpha[:-1]])
    return DenoisingGrid(ascending.flip(0), alpha.flip(0), following.flip(0))
