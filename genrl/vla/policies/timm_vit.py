"""Vision transformers with the names and the mathematics of timm's, of which OpenVLA's checkpoints are made.

Not transformers' classes: theirs have queries, keys and values apart (timm: one matrix), and DINOv2's has a place for
the class token that timm's has not, so that no tensor of a file would be one of the module's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer


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
