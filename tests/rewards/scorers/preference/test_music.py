"""CLAP on sounds, from a random checkpoint in the true format, and the sounds that it is given."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import genrl_rewards
from genrl_rewards.models.checkpoints import transformers
from genrl_rewards.scorers.preference.clap import resampled, segments
from genrl_rewards.scorers.texts.tunes import louder
from tests.rewards.tiny_clap import RATE, SECONDS, save_tiny_clap


@pytest.fixture(scope="module")
def clap(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_clap(tmp_path_factory.mktemp("clap")))


def tone(hertz: float, seconds: float, rate: int) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(round(seconds * rate)) / rate)


class TestClap:
    def test_the_cosine_is_that_of_transformers(self, clap: str) -> None:
        reward = genrl_rewards.load("clap", {"model": clap})
        sounds, prompts = [tone(100, SECONDS, RATE), tone(40, 1, RATE)], ["low", "a very high tune"]
        scores = reward(sounds, [RATE] * 2, prompts)
        model, words = transformers.ClapModel.from_pretrained(clap), transformers.ClapProcessor.from_pretrained(clap)
        told = words(
            text=prompts, audio=[s.numpy() for s in sounds], sampling_rate=RATE, padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            found = model(**told)
        wanted = (found.audio_embeds * found.text_embeds).sum(1)
        assert torch.allclose(torch.tensor(scores), wanted, atol=1e-5)

    def test_a_long_sound_is_heard_in_three_places_and_always_the_same(self, clap: str) -> None:
        reward = genrl_rewards.load("clap", {"model": clap})
        long = torch.cat([tone(hertz, SECONDS, RATE) for hertz in (30, 90, 270)])
        parts = reward(list(long.split(SECONDS * RATE)), [RATE] * 3, ["low"] * 3)
        whole = [reward([long], [RATE], ["low"])[0] for _ in range(2)]
        assert whole[0] == whole[1] == pytest.approx(float(np.mean(parts)), abs=1e-5)

    def test_stereo_and_another_rate(self, clap: str) -> None:
        reward = genrl_rewards.load("clap", {"model": clap})
        alone = reward([tone(100, SECONDS, RATE)], [RATE], ["low"])
        twice = reward([tone(100, SECONDS, 2 * RATE).expand(2, -1)], [2 * RATE], ["low"])
        assert twice == pytest.approx(alone, abs=1e-3)
        assert [part[0].item() for part in segments(torch.arange(100), 20)] == [0, 40, 80]
        assert len(segments(torch.arange(20), 20)) == 1


def test_a_tone_at_another_rate_is_the_same_tone() -> None:
    assert torch.allclose(resampled(tone(50, 2, 800), 800, 1200), tone(50, 2, 1200), atol=1e-3)
    assert resampled(tone(500, 2, 1200), 1200, 800).abs().max() < 1e-3  # above half the lower rate


def test_louder_is_a_correlation_with_time() -> None:
    notes = torch.ones(9, 80)
    steps = torch.arange(1.0, 10.0)[:, None]
    sounds = [(notes * steps).flatten(), (notes * steps.flip(0)).flatten(), notes.flatten()]
    assert louder(sounds, [800] * 3) == pytest.approx([1.0, -1.0, 0.0])
