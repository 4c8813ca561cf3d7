"""Noise levels: the grids that samplers step down, the levels that losses draw, and a finished sample noised to one.

A grid goes from sigma = 1, noise, to 0, data: float32 [N + 1], strictly decreasing, its last value 0; it is computed in
float64. Pin the grid of a run and store it with its trajectories: what a scheduler makes by default differs between
releases.

Losses that need no sampling steps live on the forward process, which noises a finished sample to any level
(DiffusionNFT, AWM, DGPO, CRD, Diffusion-DPO, Diff-Instruct*). Shapes: clean, noise [B, ...]; levels a float, [] or [B].
float32, float64 if clean or noise is.

Their levels are draws over (0, 1) or over the steps of a grid, float32 on the CPU, functions of the generator's state
(see `noise.generator`). Stratified draws fall into one of `count` equal parts each, which lowers the variance of the
loss and changes no mean. AWM takes six per iteration, shared by a micro-batch (arXiv 2509.25050; code).
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.mdp.kernels import PredictionType, compute_dtype, per_sample

Scalar = Tensor | float


def linspace_grid(steps: int) -> Tensor:
    """`1, (N-1)/N, ..., 1/N, 0`, float32 [steps + 1]: the unshifted grid of pi0 and of the embedded policies.

    Raises ValueError for fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"a grid needs at least one step, got {steps}")
    sigmas = torch.linspace(1.0, 1.0 / steps, steps, dtype=torch.float64)
    return torch.cat([sigmas, sigmas.new_zeros(1)]).float()


def compressed_tail(sigmas: Tensor, start: int, steps: int) -> Tensor:
    """`steps` + 1 levels from sigmas[start] down to 0 in place of the grid's own: MixGRPO-Flash's tail.

    Evenly spaced places in the grid, linear between its values, for a grid of any kind; the released code (arXiv
    2507.21802) undoes the shift of its grid, spaces evenly, and does it again. Float32 [steps + 1].
    (It counts the points, not the steps, and with one point stops at sigmas[start], never denoised.)
    Raises ValueError unless 1 <= steps <= the number that they replace.
    """
    replaces = len(sigmas) - 1 - start
    if not 0 <= start or not 1 <= steps <= replaces:
        raise ValueError(
            f"a tail of {steps} steps cannot replace the {replaces} steps from step {start} on; use 1 or more"
        )
    grid = sigmas.double()
    place = torch.linspace(start, len(grid) - 1, steps + 1, dtype=torch.float64)
    # The last place has no value of the grid to its right.
    left = place.floor().long().clamp(max=len(grid) - 2)
    tail = grid[left] + (place - left) * (grid[left + 1] - grid[left])
    # The ends to the bit: the states are at the first level, and a last one of 1e-17 would divide by it.
    tail[0], tail[-1] = grid[start], 0.0
    return tail.float()


def flow_sample(clean: Tensor, noise: Tensor, sigma: Scalar) -> Tensor:
    """`x_sigma = (1 - sigma) x0 + sigma noise`, [B, ...]: the straight path (rectified flow, arXiv 2209.03003, eq. 1).

    sigma in [0, 1], 1 = noise: a float, [] or [B].
    """
    dtype = compute_dtype(clean, noise)
    level = per_sample(sigma, clean, dtype)
    return (1.0 - level) * clean.to(dtype) + level * noise.to(dtype)


def flow_target(clean: Tensor, noise: Tensor) -> Tensor:
    """The velocity `noise - x0`, [B, ...], the same at every level (arXiv 2209.03003, eq. 1)."""
    dtype = compute_dtype(clean, noise)
    return noise.to(dtype) - clean.to(dtype)


def diffusion_sample(clean: Tensor, noise: Tensor, alpha_bar: Scalar) -> Tensor:
    """`x_t = sqrt(ab) x0 + sqrt(1 - ab) noise`, [B, ...] (arXiv 2006.11239, eq. 4).

    ab is the cumulative alpha of t, a float, [] or [B]; 0 = noise.
    """
    dtype = compute_dtype(clean, noise)
    level = per_sample(alpha_bar, clean, dtype)
    return level.sqrt() * clean.to(dtype) + (1.0 - level).sqrt() * noise.to(dtype)


def diffusion_target(clean: Tensor, noise: Tensor, alpha_bar: Scalar, prediction_type: PredictionType) -> Tensor:
    """What a network of this prediction type predicts at x_t: the noise, `sqrt(ab) noise - sqrt(1 - ab) x0`, or x0.

    In this order: epsilon (arXiv 2006.11239, eq. 14), v_prediction (arXiv 2202.00512, appendix D), sample. [B, ...];
    ab a float, [] or [B]. Raises ValueError for another name.
    """
    dtype = compute_dtype(clean, noise)
    level = per_sample(alpha_bar, clean, dtype)
    if prediction_type == "epsilon":
        return noise.to(dtype)
    if prediction_type == "v_prediction":
        return level.sqrt() * noise.to(dtype) - (1.0 - level).sqrt() * clean.to(dtype)
    if prediction_type == "sample":
        return clean.to(dtype)
    raise ValueError(f"prediction_type must be epsilon, v_prediction or sample, got {prediction_type!r}")


def flow_times(count: int, rng: torch.Generator) -> Tensor:
    """`.999 Beta(1.5, 1) + .001`, float32 [count]: openpi's times, more of them near noise (A0 of pi0's training)."""
    return 0.999 * torch.rand(count, generator=rng) ** (1.0 / 1.5) + 0.001


def logit_normal_level(generator: torch.Generator) -> Tensor:
    """`sigmoid(z)`, z standard normal, [] in [.01, 1): Stable Diffusion 3's training levels (arXiv 2403.03206, eq. 19),
    with Flow-Factory's floor of .01."""
    return torch.randn(1, generator=generator)[0].sigmoid().clamp(0.01, 1.0 - 1e-6)


def stratified_steps(count: int, first: int, last: int, generator: torch.Generator) -> Tensor:
    """Stratified step indices, int64 [count], ascending, in first .. last - 1 (first, where the range is too short).

    The range is cut at `count + 1` even points, rounded down. Fewer steps than draws repeat.
    Raises ValueError unless 0 <= first <= last and count >= 1.
    """
    if not 0 <= first <= last or count < 1:
        raise ValueError(f"{count} steps cannot be chosen from {first} .. {last}")
    edges = torch.linspace(first, last, count + 1)
    lower, upper = edges[:-1].long(), edges[1:].long()
    return lower + (torch.rand(count, generator=generator) * (upper - lower)).long()
