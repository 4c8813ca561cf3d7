"""A Gaussian denoising step and its log-probability in one pass, with the same bits when sampled and when replayed.

Every transition on the straight path is linear in the state x and the velocity v (`genrl.mdp.kernels`):

    mean = a x + b v,   x' = mean + s xi,   z = (x' - mean) / s,
    log p(x') = mean or sum over the D numbers of (-z^2 / 2 - ln s - ln(2 pi) / 2)

with a, b, s one number per sample. Backward, with x and x' constants, as in `genrl.mdp.gaussian.log_prob`:

    dv = b (dmean + dlog_p z / s)        (divided by D for the mean over D numbers)

The gain is not time (below one per cent of a model call) but that one kernel, in one order of operations and without
contraction of products and sums, makes both the recorded and the replayed log-probability: their ratio is exactly 1.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genrl.kernels.backend import Backend, choose

Reduction = Literal["mean", "sum"]
HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class Scored(NamedTuple):
    """next x' [B, ...] (no gradient), log_prob [B] and mean [B, ...], float32."""

    next: Tensor
    log_prob: Tensor
    mean: Tensor


def sde_step_torch(
    x: Tensor, velocity: Tensor, a: Tensor, b: Tensor, std: Tensor, noise: Tensor | None, taken: Tensor | None,
    reduction: Reduction,
) -> Scored:  # fmt: skip
    """The definition: the arithmetic of `genrl.mdp`, to the bit. x, velocity [B, ...]; arguments as `sde_step`."""
    wide = torch.promote_types(torch.promote_types(x.dtype, velocity.dtype), torch.float32)
    a, b, std = (t.to(x.device, wide).view(-1, *[1] * (x.dim() - 1)) for t in (a, b, std))
    mean = a * x.to(wide) + b * velocity.to(wide)
    following = (mean + std * noise.to(mean) if taken is None else taken.to(wide)).detach()  # type: ignore[union-attr]
    z = (following - mean) / std
    elements = (-0.5 * z * z - std.log() - HALF_LOG_TWO_PI).flatten(1)
    return Scored(following, elements.mean(1) if reduction == "mean" else elements.sum(1), mean)


def sde_step(
    x: Tensor,
    velocity: Tensor,
    a: Tensor,
    b: Tensor,
    std: Tensor,
    *,
    noise: Tensor | None = None,
    taken: Tensor | None = None,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
) -> Scored:
    """Sample x' by `noise`, or score the x' that was `taken` (replay): exactly one of the two is given.

    x, velocity, noise, taken [B, ...]; a, b, std [B], std > 0, on any device (the host spares a synchronisation).
    Gradients flow to `velocity` alone. The kernel takes a float32 x, noise and taken.
    Raises ValueError for both or none of noise and taken, or a std that is not positive; and as `backend.choose`.
    """
    if (noise is None) == (taken is None):
        raise ValueError("give either noise, to sample, or taken, to replay")
    if not bool((std > 0).all()):
        raise ValueError(f"a transition with std 0 is no action and has no log-probability (std {std.tolist()})")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if choose("sde_step", velocity, backend) == "torch":
        return sde_step_torch(x, velocity, a, b, std, noise, taken, reduction)
    from genrl.kernels.sde_step_triton import SDEStep

    given = noise if taken is None else taken
    found = SDEStep.apply(x, velocity, torch.stack([a, b, std]), given, taken is None, reduction)  # type: ignore[no-untyped-call]
    return Scored(*found)
