"""Rewards that hold a model, each on a small one: half precision, gradients, batches, videos."""

from pathlib import Path

import pytest
import torch

import genrl_rewards
from genrl_rewards.scorers.preference.aesthetic import HEAD_FILES, Head
from tests.rewards import tiny_blip, tiny_open_clip
from tests.rewards.asking import assert_gradients_agree, refused, scored
from tests.rewards.tiny_clip import save_tiny_clip

from transformers import Dinov2Config, Dinov2Model  # isort: skip


NAMES = ["clipscore", "pickscore", "aesthetic", "hpsv2", "imagereward", "dino", "video_consistency"]
PROMPTS = ["a cat", "two dogs"]


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


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genrl_rewards.scorers.preference.hpsv2.ARCHITECTURE", tiny_open_clip.NAME)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_gives_nearly_the_same_scores(
    arguments: dict[str, dict[str, str]], name: str, tmp_path: Path
) -> None:
    shape = (2, 2, 3, 32, 32) if name == "video_consistency" else (2, 3, 32, 32)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    columns = {}
    if name == "dino":
        genrl_rewards.to_pil(images[:1])[0].save(tmp_path / "r.png")
        columns = {"reference_image": [str(tmp_path / "r.png")] * 2}
    result = {}
    for dtype in ("float32", "bfloat16"):
        reward = genrl_rewards.load(name, arguments[name], dtype=dtype)
        scores = scored(reward, images=images, prompts=PROMPTS, columns=columns)
        result[dtype] = scores.values
    scale = 1 + max(map(abs, result["float32"]))
    assert result["bfloat16"] == pytest.approx(result["float32"], abs=0.05 * scale)
    if name not in ("dino", "video_consistency"):
        assert result["bfloat16"] != result["float32"]
    refused("unknown dtype 'int8'. Known: float32, bfloat16, float16", name, arguments[name] | {"dtype": "int8"})


@pytest.mark.parametrize(("name", "within"), [*((name, 0.005) for name in NAMES[:4]), ("imagereward", 0.03)])
def test_gradients_batches_and_videos(arguments: dict[str, dict[str, str]], name: str, within: float) -> None:
    """The two paths agree and reach the picture; a sample's company does not count; a video is its frames' mean."""
    reward = genrl_rewards.load(name, arguments[name] | ({"scale": "over_26"} if name == "pickscore" else {}))
    images = torch.rand(2, 3, 41, 33, generator=torch.Generator().manual_seed(3))
    assert_gradients_agree(reward, images, PROMPTS, within=within)
    together = genrl_rewards.score(reward, images=images, prompts=PROMPTS).values
    alone = [
        genrl_rewards.score(reward, images=images[k : k + 1], prompts=PROMPTS[k : k + 1]).values[0] for k in range(2)
    ]
    assert together == pytest.approx(alone, abs=1e-5)
    video = genrl_rewards.score(reward, images=torch.stack([images, images.flip(0)]), prompts=PROMPTS).values
    for value, prompt in zip(video, PROMPTS, strict=True):
        frames = genrl_rewards.score(reward, images=images, prompts=[prompt] * 2).values
        assert value == pytest.approx(sum(frames) / 2, abs=1e-5)


def test_no_gradients_through_another_preparation(arguments: dict[str, dict[str, str]]) -> None:
    reward = genrl_rewards.load("clipscore", arguments["clipscore"])
    reward.scorer.image_processor.size = {"shortest_edge": 64}
    with pytest.raises(ValueError, match="clipscore: no gradients through a preparation other than bicubic"):
        assert_gradients_agree(reward, torch.rand(2, 3, 41, 33), PROMPTS, within=1)


def test_the_logit_scale_is_not_rounded(arguments: dict[str, dict[str, str]]) -> None:
    """In bfloat16 ln 100 would give a scale of 98.9."""
    scale = {
        genrl_rewards.load("pickscore", arguments["pickscore"] | {"dtype": dtype}).scorer.logit_scale
        for dtype in ("float32", "bfloat16")
    }
    assert len(scale) == 1
