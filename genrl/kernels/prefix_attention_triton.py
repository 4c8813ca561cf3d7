"""The kernels of `prefix_attention`. All tensors contiguous; softmax in base 2, running maximum and sum as in
FlashAttention-2. A row's queries walk over the prefix (read by all its rows, mostly from cache), then their own keys.

`dq_kernel` walks as the forward does. `dkv_kernel` belongs to a block of keys and walks over the queries that see it:
of all rows of the prefix, or of the one row whose own keys they are. No atomics: the same bits in every run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from genrl.kernels.machine import interprets

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, CAST: tl.constexpr):
    """CAST: the interpreter multiplies the bit patterns of bfloat16 (triton-lang/triton#11584), so not in bfloat16."""
    if CAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _tile(base, at, size, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tokens `at` of a [size, D] matrix, zero outside."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(base + at[:, None] * D + d[None, :], (at[:, None] < size) & (d[None, :] < D), 0.0)


@triton.jit
def _seen(at, to, size, mask, MASK: tl.constexpr, CAUSAL: tl.constexpr):
    visible = to < size
    if MASK:
        visible = visible & (tl.load(mask + to, visible, 0) != 0)
    both = visible[None, :] & (at[:, None] >= 0)
    if CAUSAL:
        both = both & (to[None, :] <= at[:, None])
    return both


@triton.jit
def _walk(
    q, at, acc, top, total, k, v, mask, size, end, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    CAST: tl.constexpr,
):  # fmt: skip
    """Queries `q` over keys [0, end): running weighted sum, maximum (base 2) and normaliser."""
    for start in range(0, end, N):
        to = start + tl.arange(0, N)
        s = _dot(q, tl.trans(_tile(k, to, size, D, BLOCK_D)), CAST) * (scale * LOG2E)
        s = tl.where(_seen(at, to, size, mask, MASK, CAUSAL), s, float("-inf"))
        # Online softmax: what was summed so far is shrunk to the new maximum, so no exponential overflows.
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # a tile of padding before anything was seen
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        values = _tile(v, to, size, D, BLOCK_D)
        acc = acc * shrink[:, None] + _dot(p.to(values.dtype), values, CAST)
        top = new
    return acc, top, total


@triton.jit
def forward_kernel(
    q, k, v, prefix_k, prefix_v, mask, row_of, o, lse, length, prefix, scale,
    H: tl.constexpr, KEY_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    MASK: tl.constexpr, OWN: tl.constexpr, CAUSAL: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """grid (blocks of M queries, R H). lse: float32 [R, H, T], log2 of the normaliser."""
    row, head = tl.program_id(1) // H, tl.program_id(1) % H
    n, key_head = tl.load(row_of + row), head // (H // KEY_H)
    at = tl.program_id(0) * M + tl.arange(0, M)
    mine = tl.program_id(1).to(tl.int64) * length
    tile = _tile(q + mine * D, at, length, D, BLOCK_D)
    acc, top, total = (
        tl.zeros([M, BLOCK_D], tl.float32),
        tl.full([M], float("-inf"), tl.float32),
        tl.zeros([M], tl.float32),
    )
    shared = (n * KEY_H + key_head).to(tl.int64) * prefix * D
    acc, top, total = _walk(
        tile, at, acc, top, total, prefix_k + shared, prefix_v + shared, mask + n * prefix, prefix, prefix, scale,
        D, BLOCK_D, N, MASK, False, CAST,
    )  # fmt: skip
    if OWN:
        own = (row * KEY_H + key_head).to(tl.int64) * length * D
        end = tl.minimum((tl.program_id(0) + 1) * M, length) if CAUSAL else length
        acc, top, total = _walk(
            tile, at, acc, top, total, k + own, v + own, mask, length, end, scale,
            D, BLOCK_D, N, False, CAUSAL, CAST,
        )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    inside = at < length
    result = (acc / total[:, None]).to(o.dtype.element_ty)
    tl.store(o + mine * D + at[:, None] * D + d[None, :], result, inside[:, None] & (d[None, :] < D))
    tl.store(lse + mine + at, top + tl.log2(total), inside)


@triton.jit
def _walk_back(
    q, do, lse, delta, at, dq, k, v, mask, size, end, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    CAST: tl.constexpr,
):  # fmt: skip
    for start in range(0, end, N):
        to = start + tl.arange(0, N)
        keys = _tile(k, to, size, D, BLOCK_D)
        s = _dot(q, tl.trans(keys), CAST) * (scale * LOG2E)
        p = tl.where(_seen(at, to, size, mask, MASK, CAUSAL), tl.exp2(s - lse[:, None]), 0.0)
        dp = _dot(do, tl.trans(_tile(v, to, size, D, BLOCK_D)), CAST)
        dq += _dot((p * (dp - delta[:, None])).to(keys.dtype), keys, CAST)
    return dq


@triton.jit
def dq_kernel(
    q, k, v, prefix_k, prefix_v, mask, row_of, do, lse, delta, dq, length, prefix, scale,
    H: tl.constexpr, KEY_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    MASK: tl.constexpr, OWN: tl.constexpr, CAUSAL: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(1) // H, tl.program_id(1) % H
    n, key_head = tl.load(row_of + row), head // (H // KEY_H)
    at = tl.program_id(0) * M + tl.arange(0, M)
    inside = at < length
    mine = tl.program_id(1).to(tl.int64) * length
    tile, grad = _tile(q + mine * D, at, length, D, BLOCK_D), _tile(do + mine * D, at, length, D, BLOCK_D)
    level, rest = tl.load(lse + mine + at, inside, 0.0), tl.load(delta + mine + at, inside, 0.0)
    shared = (n * KEY_H + key_head).to(tl.int64) * prefix * D
    found = _walk_back(
        tile, grad, level, rest, at, tl.zeros([M, BLOCK_D], tl.float32), prefix_k + shared, prefix_v + shared,
        mask + n * prefix, prefix, prefix, scale, D, BLOCK_D, N, MASK, False, CAST,
    )  # fmt: skip
    if OWN:
        own = (row * KEY_H + key_head).to(tl.int64) * length * D
        end = tl.minimum((tl.program_id(0) + 1) * M, length) if CAUSAL else length
        found = _walk_back(
            tile, grad, level, rest, at, found, k + own, v + own, mask, length, end, scale,
            D, BLOCK_D, N, False, CAUSAL, CAST,
        )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    to = dq + mine * D + at[:, None] * D + d[None, :]
    tl.store(to, (found * scale).to(dq.dtype.element_ty), inside[:, None] & (d[None, :] < D))


@triton.jit
def dkv_kernel(
    q, k, v, mask, order, offsets, do, lse, delta, dk, dv, length, size, scale,
    H: tl.constexpr, KEY_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """grid (blocks of N keys, owners KEY_H). An owner is a prefix or a row, with `size` keys; the rows that see it are
    order[offsets[owner] : offsets[owner + 1]]."""
    owner, key_head = tl.program_id(1) // KEY_H, tl.program_id(1) % KEY_H
    to = tl.program_id(0) * N + tl.arange(0, N)
    mine = tl.program_id(1).to(tl.int64) * size * D
    keys, values = _tile(k + mine, to, size, D, BLOCK_D), _tile(v + mine, to, size, D, BLOCK_D)
    sum_k, sum_v = tl.zeros([N, BLOCK_D], tl.float32), tl.zeros([N, BLOCK_D], tl.float32)
    first = (tl.program_id(0) * N // M) * M if CAUSAL else 0  # earlier queries do not see these keys
    for i in range(tl.load(offsets + owner), tl.load(offsets + owner + 1)):
        row = tl.load(order + i)
        for head in range(key_head * (H // KEY_H), (key_head + 1) * (H // KEY_H)):
            base = (row * H + head).to(tl.int64) * length
            for start in range(first, length, M):
                at = start + tl.arange(0, M)
                inside = at < length
                tile = _tile(q + base * D, at, length, D, BLOCK_D)
                grad = _tile(do + base * D, at, length, D, BLOCK_D)
                level, rest = tl.load(lse + base + at, inside, 0.0), tl.load(delta + base + at, inside, 0.0)
                s = _dot(tile, tl.trans(keys), CAST) * (scale * LOG2E)
                seen = _seen(at, to, size, mask + owner * size, MASK, CAUSAL) & inside[:, None]
                p = tl.where(seen, tl.exp2(s - level[:, None]), 0.0)
                sum_v += _dot(tl.trans(p.to(grad.dtype)), grad, CAST)
                ds = p * (_dot(grad, tl.trans(values), CAST) - rest[:, None])
                sum_k += _dot(tl.trans(ds.to(tile.dtype)), tile, CAST)
    d = tl.arange(0, BLOCK_D)
    where = mine + to[:, None] * D + d[None, :]
    inside = (to[:, None] < size) & (d[None, :] < D)
    tl.store(dk + where, (sum_k * scale).to(dk.dtype.element_ty), inside)
    tl.store(dv + where, sum_v.to(dv.dtype.element_ty), inside)


class Tiles(NamedTuple):
    """M queries by N keys, and how a program is run."""

    M: int
    N: int
    num_warps: int
    num_stages: int


def tiles(row: int, backward: bool) -> Tiles:
    """Choose tiles by the bytes of a head's row alone: no tuning at import, the same order of sums on every device.
    Such that no target of `aot.py` spills."""
    if interprets():
        return Tiles(16, 16, 4, 1)
    if backward:
        return Tiles(32, 32, 4, 2) if row <= 256 else Tiles(16, 32, 8, 1)
    return Tiles(64, 64, 4, 2) if row <= 256 else Tiles(32, 32, 8, 1)


def attend(
    query: Tensor, key: Tensor | None, value: Tensor | None, prefix_key: Tensor, prefix_value: Tensor, row_of: Tensor,
    prefix_mask: Tensor | None, causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    """Outputs [R, H, T, D]; arguments as `prefix_attention`."""
    output: Tensor = PrefixAttention.apply(
        query, key, value, prefix_key, prefix_value, row_of, prefix_mask, causal and key is not None, scale
    )
    return output


class PrefixAttention(torch.autograd.Function):
    """Outputs [R, H, T, D] of `prefix_attention`, with gradients to queries, keys and values."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Any, value: Any, prefix_key: Tensor, prefix_value: Tensor, row_of: Tensor,
        prefix_mask: Any, causal: bool, scale: float,
    ) -> Tensor:  # fmt: skip
        """Arguments as `prefix_attention`: query [R, H, T, D], prefixes [N, H', P, D]."""
        query, prefix_key, prefix_value = query.contiguous(), prefix_key.contiguous(), prefix_value.contiguous()
        # what is absent is never read: any tensor stands in for it
        keyed = (query, query) if key is None else (key.contiguous(), value.contiguous())
        mask = row_of if prefix_mask is None else prefix_mask.contiguous().to(torch.int8)
        rows, heads, length, size = query.shape
        row = size * query.element_size()
        shape = tiles(row, backward=False)
        output, lse = torch.empty_like(query), query.new_empty(rows, heads, length, dtype=torch.float32)
        sizes = {
            "H": heads, "KEY_H": prefix_key.shape[1], "D": size, "BLOCK_D": max(16, triton.next_power_of_2(size)),
            "CAST": interprets(),
            "enable_fp_fusion": True,  # said at every launch: the default differs between releases of Triton
        }  # fmt: skip
        ctx.settings = sizes | tiles(row, backward=True)._asdict()
        ctx.masked, ctx.own, ctx.causal, ctx.scale = prefix_mask is not None, key is not None, causal, scale
        forward_kernel[(triton.cdiv(length, shape.M), rows * heads)](
            query, *keyed, prefix_key, prefix_value, mask, row_of, output, lse, length, prefix_key.shape[2], scale,
            MASK=ctx.masked, OWN=ctx.own, CAUSAL=causal, **sizes, **shape._asdict(),
        )  # fmt: skip
        ctx.save_for_backward(query, *keyed, prefix_key, prefix_value, row_of, mask, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """grad [R, H, T, D]; each gradient has the shape of its input."""
        query, key, value, prefix_key, prefix_value, row_of, mask, output, lse = ctx.saved_tensors
        rows, heads, length, _ = query.shape
        prefixes, inner, prefix, _ = prefix_key.shape
        grad = grad.contiguous()
        delta = (grad.float() * output.float()).sum(-1)
        dq, dpk, dpv = torch.empty_like(query), torch.empty_like(prefix_key), torch.empty_like(prefix_value)
        settings, scale = ctx.settings, ctx.scale
        dq_kernel[(triton.cdiv(length, settings["M"]), rows * heads)](
            query, key, value, prefix_key, prefix_value, mask, row_of, grad, lse, delta, dq, length, prefix, scale,
            MASK=ctx.masked, OWN=ctx.own, CAUSAL=ctx.causal, **settings,
        )  # fmt: skip
        order = row_of.argsort(stable=True)
        offsets = offsets_of(row_of, prefixes)
        dkv_kernel[(triton.cdiv(prefix, settings["N"]), prefixes * inner)](
            query, prefix_key, prefix_value, mask, order, offsets, grad, lse, delta, dpk, dpv, length, prefix, scale,
            MASK=ctx.masked, CAUSAL=False, **settings,
        )  # fmt: skip
        if not ctx.own:
            return dq, None, None, dpk, dpv, None, None, None, None
        dk, dv = torch.empty_like(key), torch.empty_like(value)
        each = torch.arange(rows + 1, device=query.device)
        dkv_kernel[(triton.cdiv(length, settings["N"]), rows * inner)](
            query, key, value, mask, each, each, grad, lse, delta, dk, dv, length, length, scale,
            MASK=False, CAUSAL=ctx.causal, **settings,
        )  # fmt: skip
        return dq, dk, dv, dpk, dpv, None, None, None, None


def offsets_of(row_of: Tensor, prefixes: int) -> Tensor:
    """Offsets at which the rows of each prefix begin among the rows in order, [N + 1]. row_of: int64 [R]."""
    return torch.nn.functional.pad(torch.bincount(row_of, minlength=prefixes).cumsum(0), (1, 0))
