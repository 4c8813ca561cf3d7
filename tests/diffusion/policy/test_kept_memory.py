"""The table of the memory estimate, against what blocks of denoisers keep for the backward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel
from torch import Tensor, nn

from genrl.config import LoRA
from genrl.diffusion.config.estimate import Component
from genrl.diffusion.config.memory_estimate import _kept_by_blocks
from genrl.diffusion.policy.adapters import trainable

WIDTH, TEXT = 512, 77
ROTATED = {"attention_head_dim": 128, "num_attention_heads": 4}
PICTURE = torch.randn(1, 256, 64)
STATES = torch.randn(1, TEXT, 64)
POOLED = torch.randn(1, 64)


def sd3(**settings: Any) -> tuple[nn.Module, Callable[..., Any]]:
    model = SD3Transformer2DModel(
        sample_size=32, num_layers=2, attention_head_dim=64, num_attention_heads=8, joint_attention_dim=64,
        caption_projection_dim=WIDTH, pooled_projection_dim=64, **settings,
    )  # fmt: skip
    picture = torch.randn(1, 16, 32, 32)
    return model, lambda to: model(to(picture), to(STATES), to(POOLED), torch.tensor([500.0]))


def flux() -> tuple[nn.Module, Callable[..., Any]]:
    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=2, joint_attention_dim=64, pooled_projection_dim=64, guidance_embeds=True,
        **ROTATED,
    )  # fmt: skip
    return model, lambda to: model(
        to(PICTURE), to(STATES), to(POOLED), to(torch.tensor([0.5])), torch.zeros(256, 3), torch.zeros(TEXT, 3),
        guidance=torch.tensor([3.5]),
    )  # fmt: skip


def qwen_image() -> tuple[nn.Module, Callable[..., Any]]:
    model = QwenImageTransformer2DModel(num_layers=2, joint_attention_dim=64, **ROTATED)
    mask = torch.ones(1, TEXT, dtype=torch.long)
    return model, lambda to: model(
        to(PICTURE), to(STATES), mask, to(torch.tensor([0.5])), img_shapes=[[(1, 16, 16)]]
    )  # fmt: skip


def wan() -> tuple[nn.Module, Callable[..., Any]]:
    model = WanTransformer3DModel(num_layers=2, text_dim=64, freq_dim=64, ffn_dim=2973, **ROTATED)  # as 8960 of 1536
    video = torch.randn(1, 16, 3, 32, 32)
    return model, lambda to: model(to(video), torch.tensor([500.0]), to(STATES[:, :8]))


MODELS = {
    "SD3": (sd3, 256 + TEXT),
    "SD3.5": (lambda: sd3(qk_norm="rms_norm"), 256 + TEXT),
    "SD3.5, dual": (lambda: sd3(qk_norm="rms_norm", dual_attention_layers=(0,)), 256 + TEXT),
    "FLUX.1": (flux, 256 + TEXT),
    "Qwen-Image": (qwen_image, 256 + TEXT),
    "Wan": (wan, 3 * 256),
}
"""Name -> model of the published proportions, and tokens that run through its blocks."""


@pytest.mark.parametrize(("name", "way"), [*((name, "whole") for name in MODELS), ("SD3", "lora"), ("FLUX.1", "half")])
def test_what_blocks_keep(name: str, way: str) -> None:
    make, tokens = MODELS[name]
    model, call = make()
    dtype = torch.bfloat16 if way == "half" else torch.float32
    model.to(dtype).requires_grad_(False)
    trainable({"transformer": model}, None if way == "whole" else LoRA())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(lambda tensor: tensor.to(dtype))
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    settings = dict(model.config)
    layers = settings["num_layers"] + settings.get("num_single_layers", 0)
    component = Component("transformer", type(model).__name__, 0, 0, {}, settings)
    estimate = getattr(_kept_by_blocks(component, layers, 256 / tokens if "SD3" in name else 1.0), way)
    assert found / (tokens * layers * WIDTH) == pytest.approx(estimate, rel=0.12)
