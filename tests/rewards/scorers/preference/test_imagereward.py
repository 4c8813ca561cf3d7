"""ImageReward: transformers' BLIP with the published weights' names against the published equations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rewards
from rewards.scorers.preference.imagereward import MEAN, STD, TOKENS, prepare
from tests.rewards import tiny_blip
from tests.rewards.gradients import assert_gradients_agree

PROMPTS = ["red circles", "a b c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_blip.save(tmp_path_factory.mktemp("imagereward"))


@pytest.fixture(scope="module")
def reward(folder: Path) -> rewards.Reward:
    return rewards.load("imagereward", {"model": str(folder), "tokenizer": str(folder)})


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(2, 3, 41, 33, generator=torch.Generator().manual_seed(3))


def test_scores_follow_the_published_equations(reward: rewards.Reward, images: torch.Tensor) -> None:
    scores = rewards.score(reward, images=images, prompts=PROMPTS)
    text = reward.tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    raw = tiny_blip.reference_score(tiny_blip.weights(), prepare(images, 32), text.input_ids, text.attention_mask)
    assert scores.values == pytest.approx(((raw - MEAN) / STD).tolist(), abs=1e-4)
    assert abs(scores.values[0] - scores.values[1]) > 1e-3


def test_the_prompt_and_the_picture_both_count_and_long_prompts_are_cut(
    reward: rewards.Reward, images: torch.Tensor
) -> None:
    same = images[:1].repeat(3, 1, 1, 1)
    scores = rewards.score(reward, images=same, prompts=["a " * 40, "a " * 60, "b"]).values
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert abs(scores[0] - scores[2]) > 1e-3


def test_gradients_reach_the_picture_and_the_two_paths_agree(reward: rewards.Reward, images: torch.Tensor) -> None:
    assert_gradients_agree(reward, images, PROMPTS, within=0.03)


def test_the_crop_is_central_and_the_shorter_side_is_kept() -> None:
    image = torch.zeros(1, 3, 32, 96)
    image[..., 32:64] = 1.0
    assert prepare(image, 32)[..., 1:-1].min() > 1.5 and prepare(image, 32).shape == (1, 3, 32, 32)


def test_other_checkpoints_are_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="imagereward: .* has no ImageReward.safetensors or ImageReward.pt.*empty"):
        rewards.load("imagereward", {"model": str(tmp_path), "tokenizer": str(folder)})
    with pytest.raises(ValueError, match="there is no folder 'nowhere'"):
        rewards.load("imagereward", {"model": "nowhere", "tokenizer": str(folder)})
    (tmp_path / "med_config.json").write_text((folder / "med_config.json").read_text())
    torch.save({"layers.0.weight": torch.zeros(1024, 768)}, tmp_path / "ImageReward.pt")
    with pytest.raises(ValueError, match="is not an ImageReward"):
        rewards.load("imagereward", {"model": str(tmp_path), "tokenizer": str(folder)})
    held = tiny_blip.weights()
    del held["blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"]
    torch.save(held, tmp_path / "ImageReward.pt")
    with pytest.raises(ValueError, match="another architecture: it lacks 1 weights .*crossattention.self.key"):
        rewards.load("imagereward", {"model": str(tmp_path), "tokenizer": str(folder)})
