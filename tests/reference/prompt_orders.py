"""In which order the released trainers go through their prompts: Flow-GRPO, DGPO, PaCo-RL and Flow-Factory."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def k_repeat_order(
    num_prompts: int,
    *,
    world_size: int,
    batch_size: int,
    group_size: int,
    seed: int,
    iteration: int,
    shuffled: bool = True,
) -> Tensor:
    """Prompt rows [world_size, batch_size] of one global batch in Flow-GRPO's released order.

    `world_size * batch_size / group_size` prompts, the first of a permutation seeded by seed + iteration, each repeated
    group_size times, then shuffled over all places. Not shuffled: DGPO's order, groups run on over process borders.
    Raises ValueError unless a global batch holds whole groups, of different prompts.
    """
    total = world_size * batch_size
    if total % group_size:
        raise ValueError(_indivisible("world_size * batch_size", total, group_size))
    source = torch.Generator().manual_seed(seed + iteration)
    rows = _first(num_prompts, total // group_size, source).repeat_interleave(group_size)
    order = torch.randperm(total, generator=source) if shuffled else torch.arange(total)
    return rows[order].view(world_size, batch_size)


def distributed_k_repeat_order(
    num_prompts: int, prompts: int, *, world_size: int, batch_size: int, group_size: int, seed: int, epoch: int
) -> Tensor:
    """Prompt rows [world_size, batches, batch_size] of one epoch in PaCo-RL's and Flow-Factory's default order.

    All `prompts * group_size` samples under one permutation, cut into global batches: groups straddle them. `prompts`
    is first rounded up until global batches are full.
    Raises ValueError where that exceeds the number of prompts (the released code then yields short batches).
    """
    per_batch = world_size * batch_size
    unit = per_batch // math.gcd(group_size, per_batch)
    prompts = -(-prompts // unit) * unit
    source = torch.Generator().manual_seed(seed + epoch)
    rows = _first(num_prompts, prompts, source).repeat_interleave(group_size)
    rows = rows[torch.randperm(rows.numel(), generator=source)]
    return rows.view(-1, world_size, batch_size).transpose(0, 1).contiguous()


def group_contiguous_order(
    num_prompts: int, prompts: int, *, world_size: int, batch_size: int, group_size: int, seed: int, epoch: int
) -> Tensor:
    """Prompt rows [world_size, batches, batch_size] in Flow-Factory's order that keeps every group on one process.

    Raises ValueError unless prompts divide by world_size, and a process's samples by batch_size.
    """
    if prompts % world_size:
        raise ValueError(_indivisible("prompts", prompts, world_size))
    if prompts // world_size * group_size % batch_size:
        raise ValueError(_indivisible("samples per process", prompts // world_size * group_size, batch_size))
    rows = _twice_permuted(num_prompts, prompts, seed + epoch).repeat_interleave(group_size)
    return rows.view(world_size, -1, batch_size)


def group_distributed_order(
    num_prompts: int, prompts: int, *, world_size: int, batch_size: int, group_size: int, seed: int, epoch: int
) -> Tensor:
    """Prompt rows [world_size, batches, batch_size] in Flow-Factory's order that spreads groups over all processes.

    Every process holds group_size / world_size samples of each group, in the same order, and every global batch holds
    whole groups (DGPO needs it). Raises ValueError unless group_size divides by world_size, a global batch by
    group_size, and the prompts by the groups of a global batch.
    """
    if group_size % world_size:
        raise ValueError(_indivisible("group_size", group_size, world_size))
    if world_size * batch_size % group_size:
        raise ValueError(_indivisible("world_size * batch_size", world_size * batch_size, group_size))
    if prompts % (world_size * batch_size // group_size):
        raise ValueError(_indivisible("prompts", prompts, world_size * batch_size // group_size))
    rows = _twice_permuted(num_prompts, prompts, seed + epoch).repeat_interleave(group_size // world_size)
    return rows.view(1, -1, batch_size).expand(world_size, -1, -1)


def _first(num_prompts: int, count: int, source: torch.Generator) -> Tensor:
    if count > num_prompts:
        raise ValueError(f"{count} different prompts are needed, but there are only {num_prompts}")
    return torch.randperm(num_prompts, generator=source)[:count]


def _twice_permuted(num_prompts: int, prompts: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    rows = _first(num_prompts, prompts, source)
    return rows[torch.randperm(prompts, generator=source)]


def _indivisible(name: str, value: int, divisor: int) -> str:
    below = value - value % divisor
    nearest = f"{below} or {below + divisor}" if below else str(divisor)
    return f"{name} = {value} must divide by {divisor}; nearest that does: {nearest}"
