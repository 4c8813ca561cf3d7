"""HPSv2: a checkpoint of open_clip, the authors' padding, the score."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import genrl_rewards
from genrl_rewards.models.clip_model import cosine
from genrl_rewards.models.pixels import OPENAI_MEAN, OPENAI_STD, longest_side, normalise, pad_to, shortest_side
from tests.rewards import tiny_open_clip
from tests.rewards.asking import refused
from tests.rewards.tiny_open_clip import open_clip

from genrl_rewards.scorers.preference import hpsv2  # isort: skip

PROMPTS = ["a red circle", "two “blue” stars"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_open_clip.save(tmp_path_factory.mktemp("hps"))


@pytest.fixture(autouse=True)
def architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hpsv2, "ARCHITECTURE", tiny_open_clip.NAME)


def test_preparation_equals_the_golden_geometry_and_pixels(golden: Callable[[str], Any]) -> None:
    data = golden("rewards_preprocess")
    for row in json.loads(str(data["geometry_json"])):
        height, width = row["height"], row["width"]
        assert list(longest_side(height, width, 224)) == row["hpsv2_resized"]
        assert list(shortest_side(height, width, 224)) == row["clip_shortest_edge_resized"]
        padded = pad_to(torch.ones(1, 3, height, width), 224)[0, 0]
        top = int((padded[:, 112] > 0.5).nonzero()[0])
        left = int((padded[112] > 0.5).nonzero()[0])
        assert [left, top] == row["hpsv2_pad_left_top_right_bottom"][:2] and padded.shape == (224, 224)
    names = [actual for name in data.files if (actual := re.fullmatch(r"(img\d+)_hpsv2_(\d+)", name))]
    assert names
    for name in names:
        image = torch.from_numpy(data[name[1]]).permute(2, 0, 1)[None] / 255
        pixels = normalise(pad_to(image, int(name[2])), OPENAI_MEAN, OPENAI_STD)[0]
        np.testing.assert_allclose(pixels, data[name[0]], rtol=0, atol=1e-4)


def test_scores_are_open_clips_own(folder: Path, golden: Callable[[str], Any]) -> None:
    images = torch.rand(2, 3, 30, 22, generator=torch.Generator().manual_seed(0))
    reward = genrl_rewards.load("hpsv2", {"model": str(folder)})
    scores = genrl_rewards.score(reward, images=images, prompts=PROMPTS).values
    clip = open_clip.create_model(tiny_open_clip.NAME, pretrained=str(folder / "HPS_v2.1_compressed.pt")).eval()
    levels = torch.from_numpy(genrl_rewards.to_uint8(images)).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        pictures = clip.encode_image(normalise(pad_to(levels, 16), OPENAI_MEAN, OPENAI_STD), normalize=True)
        texts = clip.encode_text(open_clip.get_tokenizer(tiny_open_clip.NAME)(PROMPTS), normalize=True)
    assert scores == pytest.approx((pictures * texts).sum(-1).tolist(), abs=1e-6)
    assert abs(scores[0] - scores[1]) > 1e-3
    data = golden("rewards_clip_family")
    cos = cosine(torch.from_numpy(data["image_embeds"]), torch.from_numpy(data["text_embeds"]))
    np.testing.assert_allclose(cos, data["hps_v2"], rtol=0, atol=1e-9)


def test_other_checkpoints_are_refused_before_any_work(tmp_path: Path) -> None:
    args = {"model": str(tmp_path)}
    refused("hpsv2: unknown version '2.2'. Did you mean '2.1'", "hpsv2", args | {"version": 2.2})
    refused("has no HPS_v2.1_compressed.safetensors or .*the folder is empty", "hpsv2", args)
    file = tmp_path / "HPS_v2.1_compressed.pt"
    torch.save({"layers.0.weight": torch.zeros(3)}, file)
    refused("hpsv2: open_clip cannot load .*Missing key.*positional_embedding", "hpsv2", args)
    torch.save({"state_dict": Path("a")}, file)
    refused("open_clip cannot load .*Weights only load failed", "hpsv2", args)
