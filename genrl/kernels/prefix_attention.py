"""Attention of many rows that continue few prefixes, each prefix kept once: answers to one prompt, actions of one
observation, cross-attention to one text.

Row r of prefix n = row_of[r], its query q at position t:

    o = softmax(scale q [K_n ; K_r]^T) [V_n ; V_r]

over the prefix's valid tokens and the row's own up to t (`causal`), all of its own, or none (key None). Exact wherever
the keys and values of the prefix do not depend on what follows: causal language models, VLA suffixes, cross-attention.
NOT for the joint attention of MMDiT (SD3.5, FLUX, Qwen-Image): there the text attends to the image, so that its keys
and values differ from sample to sample and from step to step.

Backward of softmax attention, with p the weights and delta = sum(do * o) (FlashAttention-2, arXiv 2307.08691):

    dp = do V^T,   ds = p (dp - delta),   dq = scale ds K,   dk = scale ds^T q,   dv = p^T do

where dk and dv of a prefix are sums over all its rows, always in the order of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

PrefixBackend = Literal["torch", "sdpa", "flex"]


def prefix_attention_torch(
    query: Tensor, key: Tensor | None, value: Tensor | None, prefix_key: Tensor, prefix_value: Tensor, row_of: Tensor,
    prefix_mask: Tensor | None, causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    """The definition, [R, H, T, D]: every row with its own copy of its prefix, scores and weights in float32 (float64).

    Arguments as `prefix_attention`.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = prefix_key[row_of], prefix_value[row_of]
    rows, length = query.shape[0], query.shape[2]
    visible = query.new_ones(rows, 1, length, keys.shape[2], dtype=torch.bool)
    if prefix_mask is not None:
        visible = visible & prefix_mask[row_of][:, None, None]
    if key is not None and value is not None:
        own_keys = query.new_ones(length, key.shape[2], dtype=torch.bool)
        visible = torch.cat([visible, (own_keys.tril() if causal else own_keys).expand(rows, 1, -1, -1)], 3)
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
    groups = query.shape[1] // keys.shape[1]
    keys, values = (t.to(wide).repeat_interleave(groups, 1) for t in (keys, values))
    scores = (query.to(wide) @ keys.transpose(2, 3) * scale).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ values).to(query.dtype)


def prefix_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    prefix_key: Tensor,
    prefix_value: Tensor,
    *,
    row_of: Tensor,
    prefix_mask: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    backend: PrefixBackend = "sdpa",
) -> Tensor:
    """Outputs [R, H, T, D] in the dtype of query.

    query [R, H, T, D]; key, value [R, H', T, D], or None where rows attend to the prefix alone; prefix_key,
    prefix_value [N, H', P, D] with H a multiple of H'; row_of int64 [R], the prefix of each row; prefix_mask bool
    [N, P], which tokens are there (None: all; every query must see one). scale: default 1 / sqrt(D).
    backend: sdpa and flex pack the rows of a prefix into one sequence, so that its keys are there once, sdpa under a
    mask of [R/N T, P + R/N T] per prefix, flex skipping what the mask leaves out; torch is the definition.
    Raises ValueError for shapes that do not fit, and for a back-end that is named and cannot run.
    """
    rows, heads, length, size = query.shape
    num_prefixes, inner = prefix_key.shape[0], prefix_key.shape[1]
    if prefix_value.shape != prefix_key.shape or prefix_key.shape[3] != size or heads % inner:
        raise ValueError(
            f"query {list(query.shape)} does not fit prefix_key {list(prefix_key.shape)} and prefix_value "
            f"{list(prefix_value.shape)}: equal last dimensions, and heads a multiple of theirs"
        )
    for name, tensor in (("key", key), ("value", value)):
        if (key is None) != (value is None) or (tensor is not None and tensor.shape != (rows, inner, length, size)):
            raise ValueError(f"{name} must be {[rows, inner, length, size]}, or key and value both None")
    if row_of.shape != (rows,) or (
        prefix_mask is not None and prefix_mask.shape != (num_prefixes, prefix_key.shape[2])
    ):
        raise ValueError(f"row_of must be [{rows}], prefix_mask None or {[num_prefixes, prefix_key.shape[2]]}")
    if backend not in ("torch", "sdpa", "flex"):
        raise ValueError(f"kernel prefix_attention: back-end must be torch, sdpa or flex, not {backend!r}")
    if backend == "flex" and query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
        raise ValueError("kernel prefix_attention: FlexAttention has no backward on the CPU; use sdpa or torch")
    scale = size**-0.5 if scale is None else scale
    arguments = (query, key, value, prefix_key, prefix_value, row_of, prefix_mask, causal, scale)
    if backend == "torch":
        return prefix_attention_torch(*arguments)
    return _packed(*arguments, flex=backend == "flex")


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


class Slots(NamedTuple):
    """Rows of each prefix, [N, G] with G the most rows of one: `row` int64 (0 where there is none); and the place
    n G + g of each row, [R]."""

    row: Tensor
    place: Tensor


def slots(row_of: Tensor, prefixes: int) -> Slots:
    """Place of each row among those of its prefix. row_of: int64 [R], the prefix of each row."""
    # Stable: sums over the rows of a prefix go by the order of the rows, in every run.
    order = row_of.argsort(stable=True)
    counts = torch.bincount(row_of, minlength=prefixes)
    first = counts.cumsum(0) - counts
    within = torch.empty_like(row_of)
    within[order] = torch.arange(len(row_of), device=row_of.device) - first[row_of[order]]
    most = int(counts.max())
    place = row_of * most + within
    # An empty slot computes row 0 once more, and nobody reads it: cheaper than shapes that differ by prefix.
    row = row_of.new_zeros(prefixes * most).scatter(0, place, torch.arange(len(row_of), device=row_of.device))
    return Slots(row.view(prefixes, most), place)


def _packed(
    query: Tensor, key: Tensor | None, value: Tensor | None, prefix_key: Tensor, prefix_value: Tensor, row_of: Tensor,
    prefix_mask: Tensor | None, causal: bool, scale: float, *, flex: bool,
) -> Tensor:  # fmt: skip
    """The rows of a prefix side by side in one sequence of G T queries, over keys [prefix, row 1, ..., row G]."""
    num_prefixes, prefix_length, length = prefix_key.shape[0], prefix_key.shape[2], query.shape[2]
    where = slots(row_of, num_prefixes)

    def pack(own: Tensor) -> Tensor:
        """[R, h, T, D] -> [N, h, G T, D]"""
        return own[where.row].transpose(1, 2).flatten(2, 3)

    q, keys, values = pack(query), prefix_key, prefix_value
    if key is not None and value is not None:
        keys, values = torch.cat([keys, pack(key)], 2), torch.cat([values, pack(value)], 2)

    def seen(n: Any, head: Any, at: Any, to: Any) -> Any:
        """Whether query `at` of the packed sequence sees key `to`: of the prefix, or of its own row."""
        own = to - prefix_length
        same = (own >= 0) & (at // length == own // length)
        same = same & (own <= at) if causal else same
        before = to < prefix_length
        if prefix_mask is not None:
            # Clamped: flex evaluates both sides of the mask for every key, those of the rows, too.
            before = before & prefix_mask[n, to.clamp(max=prefix_length - 1)]
        return before | same

    grouped = query.shape[1] != prefix_key.shape[1]
    shape = (num_prefixes, None, q.shape[2], keys.shape[2])
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(seen, *shape, device=query.device)
        call: Any = _compiled(flex_attention) if query.is_cuda else flex_attention
        packed: Tensor = call(q, keys, values, block_mask=mask, scale=scale, enable_gqa=grouped)
    else:
        n, at, to = (torch.arange(m, device=query.device) for m in (shape[0], shape[2], shape[3]))
        allowed = seen(n[:, None, None], 0, at[None, :, None], to[None, None, :])
        packed = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=allowed.expand(num_prefixes, -1, -1)[:, None], scale=scale, enable_gqa=grouped
        )
    most = where.row.shape[1]
    output: Tensor = (
        packed.view(num_prefixes, -1, most, length, packed.shape[-1]).transpose(1, 2).flatten(0, 1)[where.place]
    )
    return output
