"""Talk2Move's choice of the steps to train (arXiv 2601.02356): stochastic up to an exit step, then a shortcut.

Off-policy step evaluation: of samples that leave the chain at each exit step, the step whose rewards differ most is
where exploring pays. Active step sampling: only the steps before it are sampled and trained, and a few ODE steps from
it finish the picture.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exit_variance(rewards: Tensor) -> Tensor:
    """Reward variance at each exit step, float64 [T]: mean over prompts of the population variance over samples.

    rewards [prompts, T, samples]: `[:, k]` of pictures whose steps 0 .. k - 1 were stochastic. NaN = no score: left
    out; a step where no prompt has two scores has variance 0.
    Raises ValueError for another number of dimensions.
    """
    if rewards.dim() != 3:
        raise ValueError(f"rewards must be [prompts, exit steps, samples], got {list(rewards.shape)}")
    values = rewards.detach().cpu().double()
    scored = ~values.isnan()
    count = scored.sum(dim=2)
    mean = values.nan_to_num(nan=0.0).sum(dim=2) / count.clamp(min=1)
    squares = torch.where(scored, values - mean[..., None], 0.0).square().sum(dim=2) / count.clamp(min=1)
    usable = count >= 2
    return torch.where(usable, squares, 0.0).sum(dim=0) / usable.sum(dim=0).clamp(min=1)


def exit_step(rewards: Tensor) -> int:
    """The exit step of largest variance, the first of equals. rewards [prompts, T, samples], as in `exit_variance`."""
    return int(exit_variance(rewards).argmax())


def shortcut_sigmas(sigmas: Tensor, exit_step: int, steps: int) -> Tensor:
    """Noise levels [steps + 1] of the shortcut: even from the grid's value at the exit step to 0.

    sigmas [T + 1], the full grid. (The released code ends at the grid's last value before 0, which leaves noise in the
    picture.) An exit at T needs no shortcut: steps must be 0 then, and only then.
    Raises ValueError otherwise, or for an exit step outside 1 .. T.
    """
    length = sigmas.numel() - 1
    if not 1 <= exit_step <= length:
        raise ValueError(f"the exit step must be in 1 .. {length}, got {exit_step}")
    if (steps == 0) != (exit_step == length) or steps < 0:
        raise ValueError(
            f"leaving {length} steps after {exit_step} needs "
            f"{'no shortcut' if exit_step == length else 'a shortcut of at least one step'}, got {steps} steps"
        )
    return torch.linspace(1.0, 0.0, steps + 1, dtype=sigmas.dtype, device=sigmas.device) * sigmas[exit_step]
