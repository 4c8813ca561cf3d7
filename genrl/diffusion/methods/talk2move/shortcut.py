"""Chains that are drawn up to an exit step and finished by a shortcut (Talk2Move, arXiv 2601.02356)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.rollout.forest import Drawn, independent
from genrl.mdp import kernels
from genrl.mdp.early_exit import shortcut_sigmas


def draw(
    policy: Policy,
    batch: Batch,
    slots: list[int],
    *,
    beat: Callable[[], None],
    kernel: Kernel,
    exit_at: int,
    shortcut: int,
    keep: bool,
) -> Drawn:
    """Samples whose steps before `exit_at` are drawn and recorded, with their graph if it is to be kept, and whose end
    is a shortcut of so many steps."""
    drawn = range(exit_at)
    trajectory = policy.roll_out(batch, kernel, drawn, stop=exit_at, keep=drawn if keep else ())
    beat()
    final = take_shortcut(policy, batch, trajectory.final, trajectory.sigmas, exit_at, shortcut)
    return independent(replace(trajectory, final=final), slots)


def take_shortcut(policy: Policy, batch: Batch, state: Tensor, sigmas: Tensor, exit_at: int, steps: int) -> Tensor:
    """From the state at step `exit_at` [B, ...] to sigma = 0, in `steps` Euler steps (never more than the grid has)."""
    levels = shortcut_sigmas(sigmas, exit_at, min(steps, len(sigmas) - 1 - exit_at))
    for sigma, sigma_next in pairwise(levels):
        state = kernels.ode(state, policy.velocity(batch, state, sigma), sigma, sigma_next).mean
    return state
