"""The gate: the probability of a classifier's label, of a video's worst frame."""

from __future__ import annotations

import pytest
import torch

import genrl_rewards
from tests.rewards import tiny_vlm  # first: it makes transformers importable beside any torchvision
from tests.rewards.asking import refused, scored

from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil  # isort: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = ViTForImageClassification(
        ViTConfig(**sizes, image_size=32, patch_size=8, id2label={0: "normal", 1: "nsfw"}, num_labels=2)
    )
    tiny_vlm.randomise(model)
    path = tmp_path_factory.mktemp("vit")
    model.save_pretrained(path)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(path)
    return str(path)


def test_it_is_the_probability_of_the_label(folder: str) -> None:
    images = torch.rand(4, 3, 40, 48, generator=torch.Generator().manual_seed(0))
    reward = genrl_rewards.load("safe", {"model": folder})
    scores = scored(reward, images=images, prompts=[""] * 4)
    pixels = ViTImageProcessorPil.from_pretrained(folder)(images=genrl_rewards.to_pil(images), return_tensors="pt")
    model = ViTForImageClassification.from_pretrained(folder)
    with torch.no_grad():
        wanted = model(**pixels).logits.softmax(-1)
    assert scores.values == pytest.approx(wanted[:, 0].tolist(), abs=1e-6)
    other = genrl_rewards.score(
        genrl_rewards.load("safe", {"model": folder, "label": "nsfw"}), images=images, prompts=[""] * 4
    )
    assert other.values == pytest.approx(wanted[:, 1].tolist(), abs=1e-6)
    video = genrl_rewards.score(reward, images=images.view(2, 2, 3, 40, 48), prompts=[""] * 2)
    refused("has no label 'normall'. Did you mean 'normal'", "safe", {"model": folder, "label": "normall"})
    assert video.values == pytest.approx(wanted[:, 0].view(2, 2).amin(1).tolist(), abs=1e-6)
