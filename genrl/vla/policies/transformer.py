"""The mathematics that the published policies' transformers share: rotary positions, masked attention, decoder layers.

Layers have the weights of transformers' (Gemma, Llama): what is done here is the order of operations, so that queries
of an action expert can attend to the keys of another network, kept from `encode`. Keys and values are [B, heads, T, D].

Vision transformers with the names and the mathematics of timm's, of which OpenVLA's checkpoints are made.

Not transformers' classes: theirs have queries, keys and values apart (timm: one matrix), and DINOv2's has a place for
the class token that timm's has not, so that no tensor of a file would be one of the module's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

ROTARY_BASE = 10_000.0
"""Longest wavelength / 2 pi of both published families, whatever the language model's own configuration says."""


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves paired: x [B, heads, T, D], positions int64 [B, T]."""
    # In float32: bfloat16 cannot tell positions beyond 256 apart.
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
    attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return attended.transpose(1, 2).flatten(2)


def heads(projection: nn.Module, x: Tensor, size: int) -> Tensor:
    """A linear layer's output [B, heads, T, size]."""
    projected: Tensor = projection(x)
    return projected.view(*x.shape[:-1], -1, size).transpose(1, 2)


class Layer(GradientCheckpointingLayer):
    """A pre-norm layer with its attention replaced, its weights under the names that they have in `layer`.

    crosses: it attends to past keys and values alone, which it projects once more (SmolVLA).
    """

    def __init__(self, layer: Any, *, crosses: bool = False) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.crosses = crosses

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, T, W] -> [B, T, W], and its own keys (rotated) and values, for others to attend to. past: keys
        (rotated) and values that it attends to before its own; condition [B, W]: for `AdaptiveNorm`s."""
        normed, gate = _norm(self.input_layernorm, x, condition)
        attend_to = self._cross_attention if self.crosses else self._self_attention
        attended, pair = attend_to(normed.to(self.self_attn.q_proj.weight.dtype), positions, mask, past)
        x = x + gate * self.self_attn.o_proj(attended).to(x.dtype)
        normed, gate = _norm(self.post_attention_layernorm, x, condition)
        passed: Tensor = self.mlp(normed.to(self.mlp.up_proj.weight.dtype))
        return x + gate * passed.to(x.dtype), pair

    def _self_attention(
        self, h: Tensor, positions: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """h [B, T, W] over what is past and itself."""
        attention = self.self_attn
        query, key, value = (
            heads(projection, h, attention.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        key = rotate(key, positions)
        pair = key, value
        if past is not None:
            key, value = torch.cat([past[0].to(key.dtype), key], 2), torch.cat([past[1].to(value.dtype), value], 2)
        return attend(rotate(query, positions), key, value, mask), pair

    def _cross_attention(
        self, h: Tensor, positions: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """h [B, T, W] over what is past, projected once more."""
        assert past is not None
        attention = self.self_attn
        key, value = (
            heads(projection, old.transpose(1, 2).flatten(2).to(projection.weight.dtype), attention.head_dim)
            for projection, old in zip((attention.k_proj, attention.v_proj), past, strict=True)
        )
        query = heads(attention.q_proj, h, attention.head_dim)
        return attend(rotate(query, positions), key, value, mask), (key, value)


def prefix(layers: Any, x: Tensor, valid: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """x [B, T, W] through the layers, every token attending to those that are there (bool [B, T]); and each layer's
    rotated keys and values, for others to attend to."""
    cache: list[tuple[Tensor, Tensor]] = []
    positions, mask = positions_of(valid), valid[:, None, None]
    for layer in layers:
        x, pair = layer(x, positions, mask)
        cache.append(pair)
    return x, cache


def stacked(kept: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """What `prefix` keeps of each layer as rows of a context: "keys", "values" [B, layers, heads, T, D]."""
    return {"keys": torch.stack([key for key, _ in kept], 1), "values": torch.stack([value for _, value in kept], 1)}


def unstacked(context: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The inverse of `stacked`."""
    return list(zip(context["keys"].unbind(1), context["values"].unbind(1), strict=True))


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
    # In float64, as LeRobot: at the shortest period angles reach 1,600, where float32 is off by 1e-4.
    share = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=sigma.device)
    angle = sigma.double()[:, None] * 2.0 * math.pi / (shortest * (longest / shortest) ** share)
    return torch.cat([angle.sin(), angle.cos()], 1).float()


def positions_of(valid: Tensor) -> Tensor:
    """Places of the tokens that are there, 0 on: bool [B, T] -> int64 [B, T]."""
    return (valid.long().cumsum(1) - 1).clamp(min=0)


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of x [B, T, W] over the tokens that are there, [B, W]."""
    is_valid = valid[..., None].to(x.dtype)
    return (x * is_valid).sum(1) / is_valid.sum(1)


def _norm(norm: nn.Module, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
    if condition is None:
        return norm(x), 1.0
    normed, gate = norm(x, condition)
    return normed, gate.to(x.dtype)


class Vit(NamedTuple):
    """Sizes. depth: blocks in the file, the last of which is not computed; registers: beside a class token, None
    without both (SigLIP); scaled: what a block adds is scaled by a vector."""

    width: int
    depth: int
    mlp: int
    heads: int
    patch: int
    registers: int | None
    scaled: bool


VITS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": Vit(1024, 24, 4096, 16, 14, 4, True),
    "vit_so400m_patch14_siglip_224": Vit(1152, 27, 4304, 16, 14, None, False),
    "dummy_dinov2": Vit(48, 3, 96, 4, 8, 4, True),
    "dummy_siglip": Vit(32, 3, 64, 4, 8, None, False),
}
"""By timm's names; "dummy": for tests."""


class Scale(nn.Module):
    """timm's LayerScale, its vector named as prismatic saves it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Block(GradientCheckpointingLayer):
    """A pre-norm layer on [B, T, W]."""

    def __init__(self, size: Vit) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, size.mlp), "fc2": nn.Linear(size.mlp, width)})
        self.ls1, self.ls2 = (Scale(width) if size.scaled else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.attn["qkv"](self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.ls1(self.attn["proj"](attended))
        passed: Tensor = self.ls2(self.mlp["fc2"](functional.gelu(self.mlp["fc1"](self.norm2(x)))))
        return x + passed


class Featurizer(nn.Module):
    """Pictures, normalised, [B, 3, S, S] -> the patches after the last block but one, [B, P, W], not normed."""

    def __init__(self, size: Vit, side: int) -> None:
        super().__init__()
        self.unused = (r"norm\..*", r"attn_pool\..*", rf"blocks\.{size.depth - 1}\..*")
        """Patterns of tensors of timm's model that are not computed with."""
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, size.width, size.patch, size.patch)})
        self.pos_embed = nn.Parameter(torch.zeros(1, (side // size.patch) ** 2, size.width))
        self.prefix = 0
        if size.registers is not None:
            self.prefix = 1 + size.registers
            self.cls_token = nn.Parameter(torch.zeros(1, 1, size.width))
            self.reg_token = nn.Parameter(torch.zeros(1, size.registers, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth - 1))

    def forward(self, pictures: Tensor) -> Tensor:
        pixels = pictures.to(self.pos_embed.dtype)
        x: Tensor = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2) + self.pos_embed
        if self.prefix:
            first = torch.cat([self.cls_token, self.reg_token], 1)
            x = torch.cat([first.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return x[:, self.prefix :]
