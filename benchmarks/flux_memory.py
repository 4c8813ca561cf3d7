"""What FLUX.1-dev needs by the estimate of `genrl check`, from the shapes of its published architecture.

    python -m benchmarks.flux_memory

No weights are made: the networks are laid out on torch's meta device. Writes flux_memory.json.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel, ModelMixin
from rich.table import Table
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from benchmarks.common import parser, save
from benchmarks.full_size import KL16
from genrl.cli.tables import console
from genrl.config import load
from genrl.diffusion.config.estimate import Component
from genrl.diffusion.config.memory_estimate import memory
from genrl.diffusion.config.schema import Config

ROWS: dict[str, tuple[str, ...]] = {
    "flux1_dev_flow_grpo": (),
    "flux1_dev_24gb": (),
    "flux1_dev_24gb, nf4": ("model.quantize=nf4",),
    "flux1_dev_24gb, blocks": ("model.quantize=null", "model.offload.denoiser=blocks"),
}
"""A file of configs/diffusion, and changes to it."""


def components() -> tuple[Component, ...]:
    """The networks of FLUX.1-dev."""
    clip = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=77,
        projection_dim=768,
    )
    t5 = T5Config(
        vocab_size=32128,
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=24,
        num_heads=64,
        feed_forward_proj="gated-gelu",
    )
    with torch.device("meta"):
        networks = {
            "text_encoder": CLIPTextModel(clip),
            "text_encoder_2": T5EncoderModel(t5),
            "transformer": FluxTransformer2DModel(guidance_embeds=True),
            "vae": AutoencoderKL(**KL16),
        }
    return tuple(_component(name, network) for name, network in networks.items())


def _component(name: str, network: nn.Module) -> Component:
    shapes = {key: tuple(p.shape) for key, p in network.named_parameters()}
    count = sum(map(math.prod, shapes.values()))
    settings: dict[str, Any] = {}
    if isinstance(network, ModelMixin):  # transformers' own settings are not asked for
        settings = {key: list(v) if isinstance(v, tuple) else v for key, v in dict(network.config).items()}
    return Component(name, type(network).__name__, count, 2 * count, shapes, settings)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    networks, results = components(), {}
    for name, changes in ROWS.items():
        config = load(f"configs/diffusion/{name.partition(',')[0]}.yaml", changes)
        assert isinstance(config, Config)
        results[name] = dict(memory(config, networks))
    table = Table("GB", *results)
    for part in sorted({part for parts in results.values() for part in parts}):
        table.add_row(part, *(f"{parts.get(part, 0) / 1e9:.2f}" for parts in results.values()))
    table.add_row("sum", *(f"{sum(parts.values()) / 1e9:.2f}" for parts in results.values()))
    console.print(table)
    save(arguments.out, "flux_memory", results)


if __name__ == "__main__":
    main()
