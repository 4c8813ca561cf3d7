"""Noise grids (sigma from 1 = noise down to 0 = data) and windows of stochastic steps.

A grid is float32 [N + 1], strictly decreasing, its last value 0; it is computed in float64. Pin the grid of a run and
store it with its trajectories: what a scheduler makes by default differs between releases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from genrl.mdp.noise import generator


def shift(sigmas: Tensor, factor: float) -> Tensor:
    """`s u / (1 + (s - 1) u)`: the resolution shift of Stable Diffusion 3 (arXiv 2403.03206, eq. 23), s = factor > 0.

    The dynamic shifts of FLUX and Qwen-Image are the same map: "exponential" has s = exp(mu), "linear" s = mu.
    """
    if factor <= 0:
        raise ValueError(f"the shift must be positive, got {factor} (a dynamic shift's factor is exp(mu), not mu)")
    return factor * sigmas / (1.0 + (factor - 1.0) * sigmas)


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


def stretch_to_terminal(sigmas: Tensor, terminal: float) -> Tensor:
    """Stretch a grid *without* its final 0 to end at `terminal`: q -> 1 - (1 - q)(1 - terminal) / (1 - q_last)."""
    return 1.0 - (1.0 - sigmas) * (1.0 - terminal) / (1.0 - sigmas[-1])


def linspace_grid(steps: int, factor: float = 1.0, *, terminal: float | None = None) -> Tensor:
    """`shift(1, (N-1)/N, ..., 1/N), 0`: FLUX, Qwen-Image, Flow-Factory, DanceGRPO, MixGRPO; unshifted in pi0.

    factor: static shift, exp(mu) or mu (see `shift`); terminal: stretch the last non-zero value to this one.
    """
    sigmas = shift(torch.linspace(1.0, 1.0 / _steps(steps), steps, dtype=torch.float64), factor)
    return _closed(sigmas if terminal is None else stretch_to_terminal(sigmas, terminal))


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


def model_timesteps(sigmas: Tensor, *, integer: bool = False, train_timesteps: int = 1000) -> Tensor:
    """Time fed to the denoiser for each value but the final 0: float `1000 sigma`, or truncated (int64) as UniPC,
    DanceGRPO and MixGRPO do, which lies up to .001 away from the sigma of the step."""
    times = sigmas[:-1] * train_timesteps
    return times.to(torch.int64) if integer else times


def window_steps(size: int, low: int, high: int, *, seed: int, iteration: int) -> range:
    """The stochastic (trained) steps of one iteration: `size` consecutive ones inside [low, high).

    Their start is uniform in low .. high - size. A pure function of its arguments: the same on every rank and for every
    sample of a group, so that a group's advantages compare one exploration budget; never empty.
    Source: the windows of MixGRPO (arXiv 2507.21802) and of Flow-GRPO-Fast (Flow-GRPO's repository).
    Raises ValueError unless 1 <= size <= high - low and low >= 0.
    """
    _check_window(size, low, high)
    starts = high - low - size + 1
    offset = int(torch.randint(starts, (1,), generator=generator(seed, "window", iteration)))
    return range(low + offset, low + offset + size)


def moving_window(
    size: int,
    low: int,
    high: int,
    *,
    iteration: int,
    hold: Callable[[int], int],
    stride: int = 1,
    wrap: bool = False,
) -> range:
    """`size` steps inside [low, high) that move down the schedule: MixGRPO's windows (arXiv 2507.21802, section 3).

    Starts are low, low + stride, ... and, last, high - size, so that every window is full and every step is reached.
    A window that starts at step l stays for hold(l) iterations (`constant_hold`, `linear_hold`, `exponential_hold`);
    after the last one it stays there (the paper), or begins anew with `wrap`. stride 0 never moves.
    A pure function of its arguments, for any iteration >= 0. Raises ValueError where the window does not fit.
    """
    _check_window(size, low, high)
    if stride < 0 or iteration < 0:
        raise ValueError(f"the stride and the iteration cannot be negative, got {stride} and {iteration}")
    last = high - size
    starts = [low] if stride == 0 else [*range(low, last, stride), last]
    return range(start := start_at(starts, hold, iteration, wrap=wrap), start + size)


def start_at(starts: Sequence[int], hold: Callable[[int], int], iteration: int, *, wrap: bool) -> int:
    """The start that is in force at `iteration`, where start l stays for max(hold(l), 1) iterations."""
    lengths = [max(hold(start), 1) for start in starts]
    if wrap:
        iteration %= sum(lengths)
    for start, length in zip(starts, lengths, strict=True):
        if iteration < length:
            return start
        iteration -= length
    return starts[-1]


def constant_hold(start: int, *, every: int) -> int:
    """tau iterations at every start: MixGRPO's default."""
    return every


def linear_hold(start: int, *, longest: int, shortest: int, steps: int) -> int:
    """`max(shortest, floor(longest (1 - p) + shortest p))`, p = start / steps: MixGRPO's linear decay (code)."""
    share = start / steps
    return max(shortest, int(longest * (1.0 - share) + shortest * share))


def exponential_hold(start: int, *, every: int, rate: float = 0.1, threshold: int = 13) -> int:
    """`ceil(tau exp(-k max(0, start - threshold)))`: MixGRPO's exponential decay (arXiv 2507.21802, and code)."""
    return math.ceil(every * math.exp(-rate * max(0, start - threshold)))


def geometric_start_probabilities(starts: int, ratio: float) -> list[float]:
    """`(1 - r) r^i / (1 - r^n)`, i = 0 .. n - 1: TreeGRPO's law of the window's start (arXiv 2512.08153); r = .5 there.

    Smaller r favours early starts; r = 1 is uniform. Raises ValueError unless 0 < r <= 1 and n >= 1.
    """
    if starts < 1 or not 0 < ratio <= 1:
        raise ValueError(f"the law needs at least one start and a ratio above 0 and up to 1, got {starts} and {ratio}")
    weights = [ratio**i for i in range(starts)]
    return [weight / math.fsum(weights) for weight in weights]


def draw_start(probabilities: Sequence[float], uniform: float) -> int:
    """The first index whose cumulative probability is above `uniform` in [0, 1): inverse-CDF sampling."""
    total = 0.0
    for index, probability in enumerate(probabilities):
        total += probability
        if uniform < total:
            return index
    return len(probabilities) - 1


def geometric_window(size: int, low: int, high: int, *, ratio: float, seed: int, iteration: int) -> range:
    """`size` consecutive steps inside [low, high), early starts more likely: `geometric_start_probabilities`.

    TreeGRPO has as many starts as steps less the size, so its window ends before the last step: high = steps - 1.
    A pure function of its arguments, as `window_steps`.
    """
    _check_window(size, low, high)
    uniform = float(torch.rand((), generator=generator(seed, "window", iteration), dtype=torch.float64))
    start = low + draw_start(geometric_start_probabilities(high - low - size + 1, ratio), uniform)
    return range(start, start + size)


def backward_interval(steps: int, *, shortest: int, longest: int, stages: int, stage: int) -> range:
    """The final steps that are branched and trained at a stage: B2-DiffuRL's backward progressive training.

    `s = shortest + floor(stage (longest - shortest + 1) / stages)` (arXiv 2503.11240 and its code; 14 to 20 of 20 steps
    over 100 stages): the interval grows from the picture's end backwards. After the last stage it stays the longest.
    Raises ValueError unless 1 <= shortest <= longest <= steps.
    """
    if not 1 <= shortest <= longest <= steps or stages < 1 or stage < 0:
        raise ValueError(
            f"an interval that grows from {shortest} to {longest} of {steps} steps over {stages} stages is impossible "
            f"(stage {stage}): it needs 1 <= shortest <= longest <= steps"
        )
    length = min(longest, shortest + stage * (longest - shortest + 1) // stages)
    return range(steps - length, steps)


def growing_noise(base: float, growth: float, depths: int) -> tuple[float, ...]:
    """`g_j = base (1 + growth j / (d - 1))`, j = 0 .. d - 1: the noise levels of a window tree of d branching steps.

    Dynamic-TreeRPO (arXiv 2509.23352) lets the noise grow linearly with the normalised depth; this formula is our
    reading of its abstract and reviews, the full text was not at hand.
    """
    return tuple(base * (1.0 + growth * (j / (depths - 1) if depths > 1 else 0.0)) for j in range(depths))


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
        left = place.floor().long().clamp(max=len(grid) - 2)
        tail = grid[left] + (place - left) * (grid[left + 1] - grid[left])
    else:
        even = torch.linspace(float(shift(grid[start], 1.0 / factor)), 0.0, steps + 1, dtype=torch.float64)
        tail = shift(even, factor)
    tail[0], tail[-1] = grid[start], 0.0
    return tail.float()


def _check_window(size: int, low: int, high: int) -> None:
    if low < 0 or size < 1 or size > high - low:
        raise ValueError(f"a window of {size} steps does not fit into steps {low} .. {high - 1}")


def _steps(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"a grid needs at least one step, got {steps}")
    return steps


def _closed(sigmas: Tensor) -> Tensor:
    return torch.cat([sigmas, sigmas.new_zeros(1)]).float()
