"""ImageReward: transformers' BLIP with the published weights' names against the published equations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import genrl_rewards
from genrl_rewards.scorers.preference.imagereward import MEAN, STD, TOKENS, prepare
from tests.rewards import tiny_blip

PROMPTS = ["red circles", "a b c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_blip.save(tmp_path_factory.mktemp("imagereward"))


@pytest.fixture(scope="module")
def reward(folder: Path) -> genrl_rewards.Reward:
    return genrl_rewards.load("imagereward", {"model": str(folder), "tokenizer": str(folder)})


def test_scores_follow_the_published_equations(reward: genrl_rewards.Reward) -> None:
    images = torch.rand(2, 3, 41, 33, generator=torch.Generator().manual_seed(3))
    scores = genrl_rewards.score(reward, images=images, prompts=PROMPTS)
    text = reward.tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    raw = tiny_blip.reference_score(tiny_blip.weights(), prepare(images, 32), text.input_ids, text.attention_mask)
    assert scores.values == pytest.approx(((raw - MEAN) / STD).tolist(), abs=1e-4)
    same = images[:1].repeat(3, 1, 1, 1)
    long = genrl_rewards.score(reward, images=same, prompts=["a " * 40, "a " * 60, "b"]).values  # cut
    assert long[0] == pytest.approx(long[1], abs=1e-6)
    assert abs(scores.values[0] - scores.values[1]) > 1e-3 and abs(long[0] - long[2]) > 1e-3
    wide = torch.zeros(1, 3, 32, 96)
    wide[..., 32:64] = 1.0  # the crop is central
    assert prepare(wide, 32)[..., 1:-1].min() > 1.5 and prepare(wide, 32).shape == (1, 3, 32, 32)


def test_other_checkpoints_are_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    def refused(words: str, model: str = str(tmp_path)) -> None:
        with pytest.raises(ValueError, match=words):
            genrl_rewards.load("imagereward", {"model": model, "tokenizer": str(folder)})

    refused("imagereward: .* has no ImageReward.safetensors or ImageReward.pt.*empty")
    refused("there is no folder 'nowhere'", "nowhere")
    (tmp_path / "med_config.json").write_text((folder / "med_config.json").read_text())
    torch.save({"layers.0.weight": torch.zeros(1024, 768)}, tmp_path / "ImageReward.pt")
    refused("is not an ImageReward")
    held = tiny_blip.weights()
    del held["blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"]
    torch.save(held, tmp_path / "ImageReward.pt")
    refused("another architecture: it lacks 1 weights .*crossattention.self.key")
