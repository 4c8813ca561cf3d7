"""Which noise levels a forward-process loss is evaluated at: draws over (0, 1) or over the steps of a grid.

Stratified draws fall into one of `count` equal parts each, which lowers the variance of the loss and changes no mean.
All are functions of the generator's state (see `noise.generator`), float32 on the CPU. A draw u of (0, 1) becomes a
level by `sigma = low + (high - low) u`. AWM takes six per iteration, shared by a micro-batch (arXiv 2509.25050; code).
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.mdp.schedules import shift


def logit_normal_draws(
    count: int, generator: torch.Generator, *, factor: float = 1.0, stratified: bool = True
) -> Tensor:
    """`shift(sigmoid(z), factor)`, z standard normal, [count] in (.01, 1): Stable Diffusion 3's training levels.

    (arXiv 2403.03206, eq. 19 with the shift of its eq. 23.) factor > 1 moves draws towards 1. Stratified draws
    come in random order. Source of the floor of .01: Flow-Factory.
    """
    if stratified:
        # At 0 and 1 the quantile function is infinite.
        even = _stratified(count, generator).clamp(1e-7, 1.0 - 1e-7)
        # In random order: strata come ascending, and the k-th draw would always be the k-th level.
        normal = torch.special.ndtri(even)[torch.randperm(count, generator=generator)]
    else:
        normal = torch.randn(count, generator=generator)
    return shift(normal.sigmoid(), factor).clamp(0.01, 1.0 - 1e-6)


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


def _stratified(count: int, generator: torch.Generator) -> Tensor:
    if count < 1:
        raise ValueError(f"at least one draw is needed, got {count}")
    return (torch.arange(count) + torch.rand(count, generator=generator)) / count
