"""The kernel of `sde_step`: blocks of BLOCK numbers of a sample, each with a partial sum of -z^2 / 2."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from genrl.kernels.sde_step import HALF_LOG_TWO_PI

BLOCK = 1024
EXACT = {"enable_fp_fusion": False}  # a product and a sum stay two roundings, in both modes and on every Triton


@triton.jit
def forward_kernel(
    x, velocity, coefficients, given, following, mean, partial, batch, size, SAMPLE: tl.constexpr, BLOCK: tl.constexpr
):
    """coefficients float32 [3, B]: a, b, s. given: the noise (SAMPLE), or x' itself."""
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    at = row.to(tl.int64) * size + column
    a, b, s = (
        tl.load(coefficients + row),
        tl.load(coefficients + batch + row),
        tl.load(coefficients + 2 * batch + row),
    )
    m = a * tl.load(x + at, inside, 0.0).to(tl.float32) + b * tl.load(velocity + at, inside, 0.0).to(tl.float32)
    tl.store(mean + at, m, inside)
    taken = tl.load(given + at, inside, 0.0).to(tl.float32)
    if SAMPLE:
        taken = m + s * taken
        tl.store(following + at, taken, inside)
    z = tl.where(inside, (taken - m) / s, 0.0)
    tl.store(partial + row * tl.num_programs(1) + part, tl.sum(-0.5 * z * z, 0))


@triton.jit
def backward_kernel(
    mean, following, coefficients, dlogp, dmean, dv, batch, size, BLOCK: tl.constexpr, DMEAN: tl.constexpr
):
    """dlogp: float32 [B], already divided by D where the log-probability is a mean."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    at = row.to(tl.int64) * size + column
    b, s = tl.load(coefficients + batch + row), tl.load(coefficients + 2 * batch + row)
    g = tl.load(dlogp + row) * ((tl.load(following + at, inside, 0.0) - tl.load(mean + at, inside, 0.0)) / s) / s
    if DMEAN:
        g += tl.load(dmean + at, inside, 0.0)
    tl.store(dv + at, (b * g).to(dv.dtype.element_ty), inside)


class SDEStep(torch.autograd.Function):
    """(x' [B, ...], log-probability [B], mean [B, ...]) of `sde_step`, with a gradient to the velocity alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, velocity: Tensor, coefficients: Tensor, given: Tensor, sample: bool, reduction: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x, velocity, given (the noise, or the x' that was taken) [B, ...]; coefficients [3, B]: a, b, std."""
        x, velocity, given = x.contiguous(), velocity.contiguous(), given.to(x.device, torch.float32).contiguous()
        coefficients = coefficients.to(x.device, torch.float32)
        batch, size = len(x), x[0].numel()
        parts = triton.cdiv(size, BLOCK)
        mean = torch.empty_like(x, dtype=torch.float32)
        following = torch.empty_like(mean) if sample else given.clone()
        partial = mean.new_empty(batch, parts)
        forward_kernel[(batch, parts)](
            x, velocity, coefficients, given, following, mean, partial, batch, size, SAMPLE=sample, BLOCK=BLOCK, **EXACT
        )
        each = partial.sum(1) / size - coefficients[2].log() - HALF_LOG_TWO_PI
        ctx.save_for_backward(mean, following, coefficients)
        ctx.dtype, ctx.share = velocity.dtype, 1.0 / size if reduction == "mean" else 1.0
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(following)
        return following, each if reduction == "mean" else each * size, mean

    @staticmethod
    def backward(ctx: Any, _: Any, dlogp: Tensor | None, dmean: Tensor | None) -> Any:
        """dlogp [B] and dmean [B, ...], None where nothing depends on them."""
        mean, following, coefficients = ctx.saved_tensors
        batch, size = len(mean), mean[0].numel()
        dv = torch.empty_like(mean, dtype=ctx.dtype)
        dlogp = mean.new_zeros(batch) if dlogp is None else (dlogp * ctx.share).contiguous()
        backward_kernel[(batch, triton.cdiv(size, BLOCK))](
            mean, following, coefficients, dlogp, mean if dmean is None else dmean.contiguous(), dv, batch, size,
            BLOCK=BLOCK, DMEAN=dmean is not None, **EXACT,
        )  # fmt: skip
        return None, dv, None, None, None, None
