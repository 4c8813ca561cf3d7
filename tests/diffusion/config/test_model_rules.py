"""Which samples several processes can compute together, by the sizes that a configuration names."""

from pathlib import Path
from typing import Any

import pytest

from genrl.config import load
from genrl.diffusion.config.estimate import Component, context_problems

ROOT = Path(__file__).resolve().parents[3]
VAE = Component("vae", "AutoencoderKL", 0, 0, {}, {"block_out_channels": [1, 1, 1, 1]})


def flux(**settings: Any) -> tuple[Component, ...]:
    plain = {"num_attention_heads": 24, "in_channels": 64, "patch_size": 1, "joint_attention_dim": 4096}
    return Component("transformer", "FluxTransformer2DModel", 0, 0, {}, plain | settings), VAE


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ([], []),
        (["sampling.width=496", "sampling.height=528"], ["1023 tokens of a picture"]),
        (["sampling.buckets=[[512,512],[528,496]]", "sampling.height=null", "sampling.width=null"], ["1023 tokens"]),
        (["evaluation.width=496", "evaluation.height=528"], ["1023 tokens of a picture"]),
        (["sampling.pipeline_args={max_sequence_length: 77}"], ["77 tokens of its text"]),
    ],
)
def test_tokens(changes: list[str], found: list[str]) -> None:
    config = load(ROOT / "configs/diffusion/flux1_dev_24gb.yaml", ["distributed.context=2", *changes])
    texts = list(context_problems(config, flux()))
    assert len(texts) == len(found) and all(part in text for part, text in zip(found, texts, strict=True))


def test_heads_and_classes() -> None:
    config = load(ROOT / "configs/diffusion/flux1_dev_24gb.yaml", ["distributed.context=2"])
    assert ["3 heads" in text for text in context_problems(config, flux(num_attention_heads=3))] == [True]
    other = Component("transformer", "SD3Transformer2DModel", 0, 0, {}, {})
    assert ["no tokens of a SD3Transformer2DModel" in text for text in context_problems(config, (other, VAE))] == [True]
    alone = load(ROOT / "configs/diffusion/flux1_dev_24gb.yaml")
    assert list(context_problems(alone, (other, VAE))) == []
