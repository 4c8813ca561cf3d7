"""The kernel of `qk_norm_rope`: a program holds ROWS rows of W / 2 pairs in registers; the backward reads x again."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from genrl.kernels.backend import FUSION


@triton.jit
def _pairs(rows, ROWS: tl.constexpr, PAIRS: tl.constexpr, W: tl.constexpr, count):
    """Offsets of the even elements of each row, and which of them exist."""
    pair = tl.arange(0, PAIRS)
    at = rows.to(tl.int64)[:, None] * W + 2 * pair[None, :]
    return at, pair, (rows[:, None] < count) & (2 * pair[None, :] < W)


@triton.jit
def _angles(cos, sin, rows, pair, mask, tokens, HALF: tl.constexpr, PER_TOKEN: tl.constexpr):
    """cos and sin of every pair: the token of row r is (r // PER_TOKEN) % tokens, PER_TOKEN rows (heads) each."""
    at = ((rows // PER_TOKEN) % tokens)[:, None] * HALF + (pair % HALF)[None, :]
    return tl.load(cos + at, mask, 1.0).to(tl.float32), tl.load(sin + at, mask, 0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    x, weight, cos, sin, y, count, tokens, eps,
    W: tl.constexpr, HALF: tl.constexpr, PER_TOKEN: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    WEIGHT: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at, pair, mask = _pairs(rows, ROWS, PAIRS, W, count)
    even, odd = tl.load(x + at, mask, 0.0).to(tl.float32), tl.load(x + at + 1, mask, 0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 1) / W + eps)
    even, odd = even * r[:, None], odd * r[:, None]
    if WEIGHT:
        inside = 2 * pair < W
        even *= tl.load(weight + 2 * pair, inside, 0.0).to(tl.float32)[None, :]
        odd *= tl.load(weight + 2 * pair + 1, inside, 0.0).to(tl.float32)[None, :]
    if ROPE:
        c, s = _angles(cos, sin, rows, pair, mask, tokens, HALF, PER_TOKEN)
        even, odd = even * c - odd * s, even * s + odd * c
    tl.store(y + at, even.to(y.dtype.element_ty), mask)
    tl.store(y + at + 1, odd.to(y.dtype.element_ty), mask)


@triton.jit
def backward_kernel(
    x, weight, cos, sin, dy, dx, dw, count, tokens, eps,
    W: tl.constexpr, HALF: tl.constexpr, PER_TOKEN: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    WEIGHT: tl.constexpr, ROPE: tl.constexpr, DW: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at, pair, mask = _pairs(rows, ROWS, PAIRS, W, count)
    even, odd = tl.load(x + at, mask, 0.0).to(tl.float32), tl.load(x + at + 1, mask, 0.0).to(tl.float32)
    r = (1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 1) / W + eps))[:, None]
    even, odd = even * r, odd * r  # x^
    m_even, m_odd = tl.load(dy + at, mask, 0.0).to(tl.float32), tl.load(dy + at + 1, mask, 0.0).to(tl.float32)
    if ROPE:
        c, s = _angles(cos, sin, rows, pair, mask, tokens, HALF, PER_TOKEN)
        m_even, m_odd = m_even * c + m_odd * s, m_odd * c - m_even * s
    inside = 2 * pair < W
    if DW:  # a row of partial sums per program, added up by torch: always in the same order
        part = dw + tl.program_id(0) * W + 2 * pair
        tl.store(part, tl.sum(m_even * even, 0), inside)
        tl.store(part + 1, tl.sum(m_odd * odd, 0), inside)
    if WEIGHT:
        m_even *= tl.load(weight + 2 * pair, inside, 0.0).to(tl.float32)[None, :]
        m_odd *= tl.load(weight + 2 * pair + 1, inside, 0.0).to(tl.float32)[None, :]
    mean = (tl.sum(m_even * even + m_odd * odd, 1) / W)[:, None]
    tl.store(dx + at, (r * (m_even - even * mean)).to(dx.dtype.element_ty), mask)
    tl.store(dx + at + 1, (r * (m_odd - odd * mean)).to(dx.dtype.element_ty), mask)


def shape(width: int) -> dict[str, int]:
    """Rows per program and padded pairs for rows of `width`: about 2,048 elements at a time."""
    pairs = triton.next_power_of_2(width // 2)
    return {"W": width, "ROWS": max(1, 1024 // pairs), "PAIRS": pairs, **FUSION}


class QKNormRope(torch.autograd.Function):
    """`qk_norm_rope` of x [B, S, H, D], with gradients to x and the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, cos: Any, sin: Any, eps: float) -> Tensor:
        """Arguments as `qk_norm_rope`: x [B, S, H, D]."""
        x = x.contiguous()
        y = torch.empty_like(x)
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        grid, numbers, tiles = _launch(x, weight, cos)
        weight, cos, sin = (x if t is None else t.contiguous() for t in (weight, cos, sin))  # unread where absent
        forward_kernel[grid](x, weight, cos, sin, y, *numbers, eps, **tiles)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        """dy [B, S, H, D]; each gradient has the shape of its input."""
        x, weight, cos, sin = ctx.saved_tensors
        grid, numbers, tiles = _launch(x, weight, cos)
        dx, wanted = torch.empty_like(x), weight is not None and ctx.needs_input_grad[1]
        dw = x.new_empty(grid[0], tiles["W"], dtype=torch.float32) if wanted else x
        like = weight
        weight, cos, sin = (x if t is None else t.contiguous() for t in (weight, cos, sin))
        backward_kernel[grid](x, weight, cos, sin, dy.contiguous(), dx, dw, *numbers, ctx.eps, **tiles, DW=wanted)
        return dx, dw.sum(0).to(like.dtype) if wanted else None, None, None, None


def _launch(x: Tensor, weight: Tensor | None, cos: Tensor | None) -> tuple[tuple[int], tuple[int, int], dict[str, Any]]:
    tokens, heads, size = x.shape[1:]
    width = size if weight is None else weight.numel()
    count = x.numel() // width
    tiles: dict[str, Any] = shape(width)
    tiles |= {
        "HALF": size // 2,
        "PER_TOKEN": heads * size // width,
        "WEIGHT": weight is not None,
        "ROPE": cos is not None,
    }
    return (triton.cdiv(count, tiles["ROWS"]),), (count, tokens), tiles
