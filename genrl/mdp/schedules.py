"""Noise grids (sigma from 1 = noise down to 0 = data) and windows of stochastic steps.

A grid is float32 [N + 1], strictly decreasing, its last value 0; it is computed in float64. Pin the grid of a run and
store it with its trajectories: what a scheduler makes by default differs between releases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.mdp.noise import generator
from genrl.mdp.plan import check_window, draw_start, geometric_start_probabilities


def shift(sigmas: Tensor, factor: float) -> Tensor:
    """`s u / (1 + (s - 1) u)`: the resolution shift of Stable Diffusion 3 (arXiv 2403.03206, eq. 23), s = factor > 0.

    sigmas: any shape, in [0, 1]. Raises ValueError for a factor that is not positive.
    The dynamic shifts of FLUX and Qwen-Image are the same map: "exponential" has s = exp(mu), "linear" s = mu.
    """
    if factor <= 0:
        raise ValueError(f"the shift must be positive, got {factor} (a dynamic shift's factor is exp(mu), not mu)")
    return factor * sigmas / (1.0 + (factor - 1.0) * sigmas)


def linspace_grid(steps: int) -> Tensor:
    """`1, (N-1)/N, ..., 1/N, 0`, float32 [steps + 1]: the unshifted grid of pi0 and of the embedded policies.

    Raises ValueError for fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"a grid needs at least one step, got {steps}")
    sigmas = torch.linspace(1.0, 1.0 / steps, steps, dtype=torch.float64)
    return torch.cat([sigmas, sigmas.new_zeros(1)]).float()


def window_steps(size: int, low: int, high: int, *, seed: int, iteration: int) -> range:
    """The stochastic (trained) steps of one iteration: `size` consecutive ones inside [low, high).

    Their start is uniform in low .. high - size. A pure function of its arguments: the same on every process and for
    every sample of a group, so that a group's advantages compare the same exploration; never empty.
    Source: the windows of MixGRPO (arXiv 2507.21802) and of Flow-GRPO-Fast (Flow-GRPO's repository).
    Raises ValueError unless 1 <= size <= high - low and low >= 0.
    """
    check_window(size, low, high)
    starts = high - low - size + 1
    offset = int(torch.randint(starts, (1,), generator=generator(seed, "window", iteration)))
    return range(low + offset, low + offset + size)


def geometric_window(size: int, low: int, high: int, *, ratio: float, seed: int, iteration: int) -> range:
    """`size` consecutive steps inside [low, high), early starts more likely: `geometric_start_probabilities`.

    TreeGRPO has as many starts as steps less the size, so its window ends before the last step: high = steps - 1.
    A pure function of its arguments, as `window_steps`.
    """
    check_window(size, low, high)
    uniform = float(torch.rand((), generator=generator(seed, "window", iteration), dtype=torch.float64))
    start = low + draw_start(geometric_start_probabilities(high - low - size + 1, ratio), uniform)
    return range(start, start + size)


def compressed_tail(sigmas: Tensor, start: int, steps: int, *, factor: float | None = None) -> Tensor:
    """`steps` + 1 levels from sigmas[start] down to 0 in place of the grid's own: MixGRPO-Flash's tail.

    factor: the grid's shift, undone before the tail is spaced evenly and done again (arXiv 2507.21802, code); None =
    evenly spaced places in the grid, linear between its values, for a grid of any kind. Float32 [steps + 1].
    (The released code counts the points, not the steps, and with one point stops at sigmas[start], never denoised.)
    Raises ValueError unless 1 <= steps <= the number that they replace.
    """
    replaces = len(sigmas) - 1 - start
    if not 0 <= start or not 1 <= steps <= replaces:
        raise ValueError(
            f"a tail of {steps} steps cannot replace the {replaces} steps from step {start} on; use 1 or more"
        )
    grid = sigmas.double()
    if factor is None:
        place = torch.linspace(start, len(grid) - 1, steps + 1, dtype=torch.float64)
        # The last place has no value of the grid to its right.
        left = place.floor().long().clamp(max=len(grid) - 2)
        tail = grid[left] + (place - left) * (grid[left + 1] - grid[left])
    else:
        even = torch.linspace(float(shift(grid[start], 1.0 / factor)), 0.0, steps + 1, dtype=torch.float64)
        tail = shift(even, factor)
    # The ends to the bit: the states are at the first level, and a last one of 1e-17 would divide by it.
    tail[0], tail[-1] = grid[start], 0.0
    return tail.float()
