"""The aesthetic predictor's head against golden numbers, and the whole reward on a small CLIP."""

import hashlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import genrl_rewards
from genrl_rewards.models.checkpoints import transformers
from genrl_rewards.scorers.preference.aesthetic import HEAD_SHA256, Head, load_head
from genrl_rewards.scorers.preference.clap import resampled, segments
from genrl_rewards.scorers.texts.tunes import louder
from tests.rewards.tiny_clap import RATE, SECONDS, save_tiny_clap
from tests.rewards.tiny_clip import save_tiny_clip


def golden_weights(seed: int, dims: np.ndarray) -> dict[str, torch.Tensor]:
    """The closed form that the golden file states."""
    held = {}
    for layer, (number, into, out) in enumerate(zip((0, 2, 4, 6, 7), dims[:-1], dims[1:], strict=True)):
        o, i = np.arange(out)[:, None], np.arange(into)[None]
        weight = ((((o + 1) * (i + 1) * (layer + 3) + 17 * seed) % 251) / 250 - 0.5) * math.sqrt(24 / into)
        held[f"layers.{number}.weight"] = torch.from_numpy(weight)
        held[f"layers.{number}.bias"] = torch.from_numpy(0.1 * np.cos(0.23 * np.arange(out) + layer + seed))
    return held


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_the_head_equals_the_golden_scores(golden: Callable[[str], Any], dtype: torch.dtype, tolerance: float) -> None:
    data = golden("rewards_aesthetic_head")
    width = int(data["dims"][0])
    head = Head(width).to(dtype).eval()
    held = golden_weights(int(data["seed"]), data["dims"])
    assert sorted(held) == sorted(head.state_dict())
    shapes = [f"{key} {tuple(value.shape)}" for key, value in head.state_dict().items()]
    assert sorted(shapes) == sorted(str(row) for row in data["state_dict_keys"])
    head.load_state_dict(held)
    embeddings = torch.nn.functional.normalize(torch.from_numpy(data["embeddings"]).to(dtype), dim=-1)
    with torch.no_grad():
        scores = head(embeddings)
        zero = head(torch.zeros(1, width, dtype=dtype)).item()
    np.testing.assert_allclose(scores, data["scores"], rtol=0, atol=tolerance)
    affine = embeddings.double() @ torch.from_numpy(data["affine_weight"]) + float(data["affine_bias"])
    np.testing.assert_allclose(scores, affine, rtol=0, atol=tolerance)
    assert zero == pytest.approx(float(data["affine_bias"]), abs=tolerance)
    assert HEAD_SHA256 == str(data["released_head_sha256"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_clip(tmp_path_factory.mktemp("clip"))
    torch.manual_seed(0)
    torch.save(Head(16).state_dict(), folder / "sac+logos+ava1-l14-linearMSE.pth")
    return folder


def test_the_reward_is_the_head_on_the_unit_embedding(folder: Path, caplog: Any, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO):
        reward = genrl_rewards.load("aesthetic", {"model": str(folder), "head": str(folder)})
    digest = hashlib.sha256((folder / "sac+logos+ava1-l14-linearMSE.pth").read_bytes()).hexdigest()
    assert f"not the published one (sha256 {digest[:16]}" in caplog.text
    images = torch.rand(3, 3, 20, 30, generator=torch.Generator().manual_seed(0))
    scores = genrl_rewards.score(reward, images=images, prompts=["", "", ""]).values
    with torch.no_grad():
        embeds = reward.scorer.embed_images(images)
        head = load_head(str(folder / "sac+logos+ava1-l14-linearMSE.pth"), 16)
        assert scores == pytest.approx(head(embeds / embeds.norm(dim=1, keepdim=True)).tolist(), abs=1e-6)
    torch.save(Head(768).state_dict(), tmp_path / "aesthetic-model.pth")
    with pytest.raises(ValueError, match="another architecture: it has in another shape 1 weights .layers.0.weight"):
        genrl_rewards.load("aesthetic", {"model": str(folder), "head": str(tmp_path)})
    with pytest.raises(ValueError, match="has no sac.logos.ava1-l14-linearMSE.pth or aesthetic-model.pth"):
        genrl_rewards.load("aesthetic", {"model": str(folder), "head": str(tmp_path.parent)})


# -- CLAP on sounds, from a random checkpoint in the true format, and the sounds that it is given
@pytest.fixture(scope="module")
def clap(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_clap(tmp_path_factory.mktemp("clap")))


def tone(hertz: float, seconds: float, rate: int) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(round(seconds * rate)) / rate)


def test_clap_is_the_cosine_of_transformers_of_three_places_of_a_sound(clap: str) -> None:
    reward = genrl_rewards.load("clap", {"model": clap})
    sounds, prompts = [tone(100, SECONDS, RATE), tone(40, 1, RATE)], ["low", "a very high tune"]
    scores = reward(sounds, [RATE] * 2, prompts)
    model, words = transformers.ClapModel.from_pretrained(clap), transformers.ClapProcessor.from_pretrained(clap)
    heard = [sound.numpy() for sound in sounds]
    with torch.no_grad():
        result = model(**words(text=prompts, audio=heard, sampling_rate=RATE, padding=True, return_tensors="pt"))
    assert torch.allclose(torch.tensor(scores), (result.audio_embeds * result.text_embeds).sum(1), atol=1e-5)
    long = torch.cat([tone(hertz, SECONDS, RATE) for hertz in (30, 90, 270)])
    parts = reward(list(long.split(SECONDS * RATE)), [RATE] * 3, ["low"] * 3)
    whole = [reward([long], [RATE], ["low"])[0] for _ in range(2)]
    assert whole[0] == whole[1] == pytest.approx(float(np.mean(parts)), abs=1e-5)
    assert [part[0].item() for part in segments(torch.arange(100), 20)] == [0, 40, 80]
    assert len(segments(torch.arange(20), 20)) == 1


def test_stereo_another_rate_and_a_tune_that_gets_louder(clap: str) -> None:
    reward = genrl_rewards.load("clap", {"model": clap})
    alone = reward([tone(100, SECONDS, RATE)], [RATE], ["low"])
    twice = reward([tone(100, SECONDS, 2 * RATE).expand(2, -1)], [2 * RATE], ["low"])
    assert twice == pytest.approx(alone, abs=1e-3)
    assert torch.allclose(resampled(tone(50, 2, 800), 800, 1200), tone(50, 2, 1200), atol=1e-3)
    assert resampled(tone(500, 2, 1200), 1200, 800).abs().max() < 1e-3  # above half the lower rate
    notes = torch.ones(9, 80)
    steps = torch.arange(1.0, 10.0)[:, None]
    sounds = [(notes * steps).flatten(), (notes * steps.flip(0)).flatten(), notes.flatten()]
    assert louder(sounds, [800] * 3) == pytest.approx([1.0, -1.0, 0.0])
