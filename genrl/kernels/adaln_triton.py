"""The kernel of `adaln`: a token per program forward; backward, ROWS tokens of one sample, so that the sums over tokens
(dgate, dscale, dshift) are a few partial ones, added up by torch always in the same order."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from genrl.kernels.backend import FUSION


@triton.jit
def forward_kernel(
    x, branch, gate, scale, shift, h, y, tokens, gate_b, gate_s, scale_b, scale_s, shift_b, shift_s, eps,
    W: tl.constexpr, BLOCK: tl.constexpr, BRANCH: tl.constexpr,
):  # fmt: skip
    """Strides `*_b`, `*_s` of the modulations over samples and tokens (0 where tokens share one)."""
    row = tl.program_id(0)
    b, s = row // tokens, row % tokens
    column = tl.arange(0, BLOCK)
    inside = column < W
    at = row.to(tl.int64) * W + column
    value = tl.load(x + at, inside, 0.0)
    if BRANCH:
        g = tl.load(gate + b * gate_b + s * gate_s + column, inside, 0.0).to(tl.float32)
        added = value.to(tl.float32) + g * tl.load(branch + at, inside, 0.0).to(tl.float32)
        value = added.to(value.dtype)
        tl.store(h + at, value, inside)
    wide = value.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / W, 0.0)
    normed = centred * (1.0 / tl.sqrt(tl.sum(centred * centred, 0) / W + eps))
    m = tl.load(scale + b * scale_b + s * scale_s + column, inside, 0.0).to(tl.float32)
    a = tl.load(shift + b * shift_b + s * shift_s + column, inside, 0.0).to(tl.float32)
    tl.store(y + at, (normed * (1.0 + m) + a).to(y.dtype.element_ty), inside)


@triton.jit
def backward_kernel(
    h, branch, gate, scale, dh, dy, dx, dbranch, dgate, dscale, dshift, tokens, gate_b, gate_s, scale_b, scale_s, eps,
    W: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BRANCH: tl.constexpr, DH: tl.constexpr,
):  # fmt: skip
    """dgate, dscale, dshift: float32 [B, programs per sample, W], sums over this program's ROWS tokens."""
    b, part = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < W
    sum_gate, sum_scale, sum_shift = (
        tl.zeros([BLOCK], tl.float32),
        tl.zeros([BLOCK], tl.float32),
        tl.zeros([BLOCK], tl.float32),
    )
    for s in range(part * ROWS, tl.minimum(part * ROWS + ROWS, tokens)):
        at = (b * tokens + s).to(tl.int64) * W + column
        wide = tl.load(h + at, inside, 0.0).to(tl.float32)
        centred = tl.where(inside, wide - tl.sum(wide, 0) / W, 0.0)
        r = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / W + eps)
        normed = centred * r
        d = tl.load(dy + at, inside, 0.0).to(tl.float32)
        sum_scale += d * normed
        sum_shift += d
        n = d * (1.0 + tl.load(scale + b * scale_b + s * scale_s + column, inside, 0.0).to(tl.float32))
        g = r * (n - tl.sum(n, 0) / W - normed * (tl.sum(n * normed, 0) / W))
        if DH:
            g += tl.load(dh + at, inside, 0.0).to(tl.float32)
        tl.store(dx + at, g.to(dx.dtype.element_ty), inside)
        if BRANCH:
            gated = tl.load(gate + b * gate_b + s * gate_s + column, inside, 0.0).to(tl.float32)
            tl.store(dbranch + at, (gated * g).to(dbranch.dtype.element_ty), inside)
            sum_gate += g * tl.load(branch + at, inside, 0.0).to(tl.float32)
    to = (b * tl.num_programs(1) + part).to(tl.int64) * W + column
    tl.store(dscale + to, sum_scale, inside)
    tl.store(dshift + to, sum_shift, inside)
    if BRANCH:
        tl.store(dgate + to, sum_gate, inside)


def shape(width: int) -> dict[str, int]:
    """Constants of a program for tokens of `width` numbers: one block, a power of two."""
    block = triton.next_power_of_2(width)
    return {"W": width, "BLOCK": block, "num_warps": min(16, max(1, block // 512)), **FUSION}


class AdaLN(torch.autograd.Function):
    """(h, y) of `adaln`, [B, S, W] each; without a branch h is an empty tensor, as x itself is h."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Any, gate: Any, scale: Tensor, shift: Tensor, eps: float) -> Any:
        """Arguments as `adaln`: x, branch [B, S, W], the modulations [B, 1 or S, W]."""
        x, tokens = x.contiguous(), x.shape[1]
        gate, scale, shift = (t if t is None or t.stride(2) == 1 else t.contiguous() for t in (gate, scale, shift))
        branch = None if branch is None else branch.contiguous()
        y, h = torch.empty_like(x), x if branch is None else torch.empty_like(x)
        given = scale if gate is None else gate  # unread where there is no branch
        strides = [n for t in (given, scale, shift) for n in _strides(t)]
        forward_kernel[(x.shape[0] * tokens,)](
            x, h if branch is None else branch, given, scale, shift, h, y, tokens, *strides, eps,
            BRANCH=branch is not None, **shape(x.shape[2]),
        )  # fmt: skip
        ctx.save_for_backward(h, branch, gate, scale)
        ctx.eps, ctx.shift_dtype = eps, shift.dtype
        ctx.set_materialize_grads(False)
        if branch is None:
            ctx.mark_non_differentiable(h := y.new_empty(0))  # x itself is h: handed on by `adaln`
        return h, y

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dy: Tensor | None) -> Any:
        """dh, dy [B, S, W], None where nothing depends on them; each gradient has the shape of its input."""
        h, branch, gate, scale = ctx.saved_tensors
        batch, tokens, width = h.shape
        dy = torch.zeros_like(h) if dy is None else dy.contiguous()
        dh = None if branch is None or dh is None else dh.contiguous()
        dx, dbranch = torch.empty_like(h), torch.empty_like(h) if branch is None else torch.empty_like(branch)
        rows = 1 if scale.shape[1] == tokens else 32
        parts = triton.cdiv(tokens, rows)
        dgate, dscale, dshift = h.new_zeros(3, batch, parts, width, dtype=torch.float32)
        given = scale if gate is None else gate
        backward_kernel[(batch, parts)](
            h, h if branch is None else branch, given, scale, dy if dh is None else dh, dy, dx, dbranch,
            dgate, dscale, dshift, tokens, *_strides(given), *_strides(scale), ctx.eps,
            ROWS=rows, BRANCH=branch is not None, DH=dh is not None, **shape(width),
        )  # fmt: skip
        if scale.shape[1] == 1:
            dgate, dscale, dshift = (t.sum(1, keepdim=True) for t in (dgate, dscale, dshift))
        of_branch = (None, None) if branch is None else (dbranch, dgate.to(gate.dtype))
        return dx, *of_branch, dscale.to(scale.dtype), dshift.to(ctx.shift_dtype), None


def _strides(modulation: Tensor) -> tuple[int, int]:
    return modulation.stride(0), 0 if modulation.shape[1] == 1 else modulation.stride(1)
