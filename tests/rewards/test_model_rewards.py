"""Models in half precision: nearly the same scores, and float32 where it counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rewards
from rewards.scorers.preference.aesthetic import HEAD_FILES, Head
from tests.rewards import tiny_blip, tiny_open_clip
from tests.rewards.tiny_clip import save_tiny_clip

from transformers import Dinov2Config, Dinov2Model  # isort: skip


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    clip = save_tiny_clip(tmp_path_factory.mktemp("clip"))
    torch.manual_seed(0)
    torch.save(Head(16).state_dict(), clip / HEAD_FILES[0])
    blip = tiny_blip.save(tmp_path_factory.mktemp("blip"))
    hps = tiny_open_clip.save(tmp_path_factory.mktemp("hps"))
    dino = tmp_path_factory.mktemp("dino")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8, "image_size": 32}
    Dinov2Model(Dinov2Config(**sizes)).save_pretrained(dino)
    return {
        "clipscore": {"model": str(clip)},
        "pickscore": {"model": str(clip), "processor": str(clip), "scale": "raw"},
        "aesthetic": {"model": str(clip), "head": str(clip)},
        "imagereward": {"model": str(blip), "tokenizer": str(blip)},
        "hpsv2": {"model": str(hps)},
        "dino": {"model": str(dino), "size": 32},
        "video_consistency": {"model": str(dino), "size": 32},
    }


NAMES = ["clipscore", "pickscore", "aesthetic", "imagereward", "hpsv2", "dino", "video_consistency"]


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_gives_nearly_the_same_scores(
    arguments: dict[str, dict[str, str]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewards.scorers.preference.hpsv2.ARCHITECTURE", tiny_open_clip.NAME)
    shape = (2, 2, 3, 32, 32) if name == "video_consistency" else (2, 3, 32, 32)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    columns = {}
    if name == "dino":
        rewards.to_pil(images[:1])[0].save(tmp_path / "r.png")
        columns = {"reference_image": [str(tmp_path / "r.png")] * 2}
    found = {}
    for dtype in ("float32", "bfloat16"):
        reward = rewards.load(name, arguments[name], dtype=dtype)
        scores = rewards.score(reward, images=images, prompts=["a cat", "two dogs"], columns=columns)
        assert not scores.failures, scores.failures[0].traceback
        found[dtype] = scores.values
    scale = 1 + max(map(abs, found["float32"]))
    assert found["bfloat16"] == pytest.approx(found["float32"], abs=0.05 * scale)
    if name not in ("dino", "video_consistency"):
        assert found["bfloat16"] != found["float32"]
    with pytest.raises(ValueError, match="unknown dtype 'int8'. Known: float32, bfloat16, float16"):
        rewards.load(name, arguments[name] | {"dtype": "int8"})


def test_the_logit_scale_is_not_rounded(arguments: dict[str, dict[str, str]]) -> None:
    """In bfloat16 ln 100 would give a scale of 98.9."""
    scale = [
        rewards.load("pickscore", arguments["pickscore"] | {"dtype": dtype}).scorer.logit_scale
        for dtype in ("float32", "bfloat16")
    ]
    assert scale[0] == scale[1]
