"""The decoder of ShapeLLM-Omni's 3D VQVAE (arXiv 2506.01853): 1,024 of 8,192 codes to 64 x 64 x 64 voxels.

The weights are those of `yejunliang23/3DVQVAE`, by their names there; their numbers say how wide and deep it is. A code
stands for a vector of several cells that lie one after the other in the last direction, and the decoder (that of
TRELLIS's sparse structures, arXiv 2412.01506) makes one logit of each voxel: above 0 it is solid. Theirs computes the
blocks in float16, ours in float32.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from genrl.vlm.config.names import SHAPE_FILES
from genrl_rewards.models.checkpoints import fill, find, read_weights

Weights = dict[str, Tensor]


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of [B, C, D, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class ResBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = ChannelNorm(width), ChannelNorm(width)
        self.conv1, self.conv2 = (nn.Conv3d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        out: Tensor = x + self.conv2(F.silu(self.norm2(hidden)))
        return out


class Upsample(nn.Module):
    """Twice the size in each direction: eight channels become the eight cells of a cube."""

    def __init__(self, width: int, narrower: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(width, 8 * narrower, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        cubes: Tensor = self.conv(x).unflatten(1, (-1, 2, 2, 2))  # [B, C, 2, 2, 2, D, H, W]
        return cubes.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6).flatten(4, 5).flatten(2, 3)


class ShapeDecoder(nn.Module):
    """Of published weights. Raises ValueError where they are of another architecture."""

    def __init__(self, weights: Weights, what: str) -> None:
        super().__init__()
        decoder = {
            name.removeprefix("Decoder."): value for name, value in weights.items() if name.startswith("Decoder.")
        }
        table = weights.get("vq.embeddings.weight")
        if table is None or not {"input_layer.weight", "out_layer.0.weight"} <= set(decoder):
            raise ValueError(f"{what} holds no VQVAE of ShapeLLM-Omni: it lacks vq.embeddings or the Decoder's layers")
        (width, self.latent), last = decoder["input_layer.weight"].shape[:2], len(decoder["out_layer.0.weight"])
        self.input_layer = nn.Conv3d(self.latent, width, 3, padding=1)
        self.middle_block = nn.Sequential(*_blocks(decoder, "middle_block"))
        self.blocks = nn.Sequential(*_blocks(decoder, "blocks"))
        self.out_layer = nn.Sequential(ChannelNorm(last), nn.SiLU(), nn.Conv3d(last, 1, 3, padding=1))
        fill(self, {name: value.float() for name, value in decoder.items()}, what)
        self.table = nn.Parameter(table.float())
        self.eval().requires_grad_(False)

    @property
    def cells(self) -> int:
        """How many cells a code stands for."""
        return self.table.shape[1] // self.latent

    @torch.no_grad()
    def logits(self, codes: Tensor) -> Tensor:
        """Occupancy of bodies, codes int64 [B, K], K cells = g^3: [B, G, G, G] by x, y and z (upwards)."""
        side = round((codes.shape[1] * self.cells) ** (1 / 3))
        latents = self.table[codes].view(len(codes), side, side, side, self.latent).movedim(-1, 1)
        out: Tensor = self.out_layer(self.blocks(self.middle_block(self.input_layer(latents))))
        return out[:, 0]

    def solid(self, codes: Tensor) -> Tensor:
        """Bodies as they are drawn, uint8 [B, G, G, G], 1 where solid: depth from the front (+y), height from above,
        width from the left. One at a time, for the last layers are large."""
        solid = torch.cat([self.logits(code[None]) > 0 for code in codes])
        return solid.permute(0, 2, 3, 1).flip(1, 2, 3).to(torch.uint8)


def _blocks(weights: Weights, part: str) -> list[nn.Module]:
    """The layers of a part in their order, as wide as their weights."""
    blocks: list[nn.Module] = []
    for number in sorted({int(m[1]) for name in weights if (m := re.match(rf"{part}\.(\d+)\.", name))}):
        wide = weights.get(f"{part}.{number}.conv.weight")
        if wide is not None:
            blocks.append(Upsample(wide.shape[1], wide.shape[0] // 8))
        else:
            blocks.append(ResBlock(len(weights[f"{part}.{number}.norm1.weight"])))
    return blocks


def load_decoder(place: str, length: int) -> ShapeDecoder:
    """Raises ValueError where there is none, or bodies of `length` codes are no cubes."""
    path = Path(place).expanduser()
    file = find(str(path) if path.exists() else place, SHAPE_FILES, "vlm.codec")
    decoder = ShapeDecoder(read_weights(file), str(file))
    if round((total := length * decoder.cells) ** (1 / 3)) ** 3 != total:
        raise ValueError(f"vlm.codec: {length} codes of {decoder.cells} cells are no cube; 1024 are")
    return decoder
