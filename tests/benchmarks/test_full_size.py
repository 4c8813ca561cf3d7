"""The rehearsals are of the architectures that were published, and of every recipe of one that fits this machine."""

from pathlib import Path

import pytest
import torch

from benchmarks.full_size import MODELS

BILLIONS = {"sd15": 0.86, "sdxl": 2.57, "pixart_sigma": 0.6, "sana_1_6b": 1.6, "sd35_medium": 2.5, "wan21_1_3b": 1.3}
BILLIONS["lumina2"] = 2.6
"""Weights of the denoisers as papers and model cards round them; the other models are cut."""


@pytest.mark.parametrize("name", BILLIONS)
def test_sizes_are_those_published(name: str) -> None:
    kind, settings = MODELS[name].denoiser
    with torch.device("meta"):
        denoiser = kind(**settings)
    assert sum(p.numel() for p in denoiser.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=0.11)


def test_recipes_are_there() -> None:
    named = {recipe for model in MODELS.values() for recipe in model.recipes} - {"flow_grpo", "diffusion_nft"}
    assert all(Path(f"configs/diffusion/{name}.yaml").is_file() for name in named)
