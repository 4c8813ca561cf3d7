"""The mathematics that the published policies' transformers share: rotary positions, masked attention, decoder layers.

Layers are those of transformers (Gemma, Llama): what is done here is the order of operations, so that queries of an
action expert can attend to the keys of another network, kept from `encode`. Keys and values are [B, heads, T, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROTARY_BASE = 10_000.0
"""Longest wavelength / 2 pi of both published families, whatever the language model's own configuration says."""


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves paired: x [B, heads, T, D], positions int64 [B, T]."""
    half = x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention [B, T, heads D]; mask bool, broadcastable to [B, 1, T, S]. Keys may have fewer heads."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.to(query.dtype)[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (key, value))
    found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return found.transpose(1, 2).flatten(2)


def heads(projection: nn.Module, x: Tensor, size: int) -> Tensor:
    """A linear layer's output [B, heads, T, size]."""
    projected: Tensor = projection(x)
    return projected.view(*x.shape[:-1], -1, size).transpose(1, 2)


def self_attention(
    h: Tensor,
    *,
    layer: Any,
    positions: Tensor,
    mask: Tensor,
    past: tuple[Tensor, Tensor] | None = None,
    kept: list[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """A layer's own attention over past keys and values (rotated) and those of h [B, T, W], which `kept` receives."""
    attention = layer.self_attn
    query, key, value = (
        heads(projection, h, attention.head_dim)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    key = rotate(key, positions)
    if kept is not None:
        kept.append((key, value))
    if past is not None:
        key, value = torch.cat([past[0].to(key.dtype), key], 2), torch.cat([past[1].to(value.dtype), value], 2)
    return attend(rotate(query, positions), key, value, mask)


def cross_attention(h: Tensor, *, layer: Any, positions: Tensor, mask: Tensor, past: tuple[Tensor, Tensor]) -> Tensor:
    """h [B, T, W] to past keys and values alone, which the layer projects once more (SmolVLA)."""
    attention = layer.self_attn
    key, value = (
        heads(projection, old.transpose(1, 2).flatten(2).to(projection.weight.dtype), attention.head_dim)
        for projection, old in zip((attention.k_proj, attention.v_proj), past, strict=True)
    )
    return attend(rotate(heads(attention.q_proj, h, attention.head_dim), positions), key, value, mask)


def decoder_layer(
    layer: Any, x: Tensor, attention: Callable[[Tensor], Tensor], condition: Tensor | None = None
) -> Tensor:
    """A pre-norm layer with its attention replaced: x [B, T, W] -> [B, T, W]; condition [B, W] for `AdaptiveNorm`s."""
    normed, gate = _norm(layer.input_layernorm, x, condition)
    attended = layer.self_attn.o_proj(attention(normed.to(layer.self_attn.q_proj.weight.dtype)))
    x = x + gate * attended.to(x.dtype)
    normed, gate = _norm(layer.post_attention_layernorm, x, condition)
    passed: Tensor = layer.mlp(normed.to(layer.mlp.up_proj.weight.dtype))
    return x + gate * passed.to(x.dtype)


def prefix(layers: Any, x: Tensor, valid: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """x [B, T, W] through the layers, every token attending to those that are there (bool [B, T]); and each layer's
    rotated keys and values, for others to attend to."""
    kept: list[tuple[Tensor, Tensor]] = []
    positions, mask = positions_of(valid), valid[:, None, None]
    for layer in layers:
        x = decoder_layer(layer, x, partial(self_attention, layer=layer, positions=positions, mask=mask, kept=kept))
    return x, kept


class AdaptiveNorm(nn.Module):
    """RMS norm with scale, shift and gate from a condition (pi0.5's adaRMS; the gate scales what the layer adds)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, W] and condition [B, W] -> normalised x [B, T, W] and gate [B, 1, W], float32."""
        scale, shift, gate = self.dense(condition.to(self.dense.weight.dtype)).float()[:, None].chunk(3, -1)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed * (1.0 + scale) + shift, gate


def final_norm(norm: nn.Module, x: Tensor, condition: Tensor | None = None) -> Tensor:
    """float32 [B, T, W]."""
    return _norm(norm, x, condition)[0].float()


def time_embedding(sigma: Tensor, width: int, shortest: float, longest: float) -> Tensor:
    """Sines, then cosines, of sigma [B] at width / 2 geometric periods from shortest to longest: float32 [B, width]."""
    share = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=sigma.device)
    angle = sigma.double()[:, None] * 2.0 * math.pi / (shortest * (longest / shortest) ** share)
    return torch.cat([angle.sin(), angle.cos()], 1).float()


def positions_of(valid: Tensor) -> Tensor:
    """Places of the tokens that are there, 0 on: bool [B, T] -> int64 [B, T]."""
    return (valid.long().cumsum(1) - 1).clamp(min=0)


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of x [B, T, W] over the tokens that are there, [B, W]."""
    there = valid[..., None].to(x.dtype)
    return (x * there).sum(1) / there.sum(1)


def _norm(norm: nn.Module, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
    if condition is None:
        return norm(x), 1.0
    normed, gate = norm(x, condition)
    return normed, gate.to(x.dtype)
