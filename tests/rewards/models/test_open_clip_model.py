"""`open_clip:MODEL` in the rewards that take a CLIP: open_clip's own numbers, its preparation, its refusals."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import genrl_rewards
from genrl_rewards.models.orient_anything import OrientAnything, orientation_of
from genrl_rewards.scorers.preference.aesthetic import HEAD_FILES, Head
from tests.rewards import tiny_open_clip, tiny_orient
from tests.rewards.asking import assert_gradients_agree
from tests.rewards.tiny_open_clip import NAME, open_clip

PROMPTS = ["a red circle", "two “blue” stars &amp; more"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_open_clip.save_folder(tmp_path_factory.mktemp("open_clip"))


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(2, 3, 30, 22, generator=torch.Generator().manual_seed(0))


def documented(name: str, weights: str | None, images: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Normalised embeddings of pictures and prompts as open_clip's README makes them."""
    clip, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=weights)
    clip.eval()
    with torch.no_grad():
        pictures = clip.encode_image(torch.stack([preprocess(p) for p in genrl_rewards.to_pil(images)]), normalize=True)
        texts = clip.encode_text(open_clip.get_tokenizer(name)(PROMPTS), normalize=True)
    return clip, pictures, texts


@pytest.mark.parametrize("form", ["folder", "file"])
def test_scores_are_those_of_open_clips_own_example(folder: Path, images: Any, form: str, tmp_path: Path) -> None:
    file = str(folder / "open_clip_model.safetensors")
    clip, pictures, texts = documented(NAME, file, images)
    cosines = (pictures * texts).sum(-1)
    model = f"open_clip:{folder}" if form == "folder" else f"open_clip:{NAME}/{file}"
    for name, scale in (("clipscore", 1.0), ("pickscore", clip.logit_scale.exp().item())):
        args = {"model": model, "scale": "cosine" if name == "clipscore" else "raw"}
        scores = genrl_rewards.score(genrl_rewards.load(name, args), images=images, prompts=PROMPTS).values
        assert scores == pytest.approx((scale * cosines).tolist(), abs=1e-5)
    assert abs(cosines[0] - cosines[1]) > 1e-3
    torch.manual_seed(0)
    head = Head(24).eval()
    torch.save(head.state_dict(), tmp_path / HEAD_FILES[0])
    aesthetic = genrl_rewards.load("aesthetic", {"model": model, "head": str(tmp_path)})
    scores = genrl_rewards.score(aesthetic, images=images, prompts=PROMPTS).values
    assert scores == pytest.approx(head(pictures).tolist(), abs=1e-5)


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
def test_gradients_reach_the_picture_through_the_same_preparation(images: Any, tmp_path: Path, mode: str) -> None:
    model = tiny_open_clip.save_folder(tmp_path / mode, resize_mode=mode, mean=[0.5] * 3, std=[0.25] * 3)
    reward = genrl_rewards.load("clipscore", {"model": f"open_clip:{model}"})
    assert_gradients_agree(reward, images, PROMPTS, within=0.005)
    tall = torch.nn.functional.pad(images, (0, 0, 0, 5))[..., :19, :16]  # 3 rows too many
    prepared = reward.scorer.prepare(tall.clone().requires_grad_()).detach()
    assert mode != "shortest" or torch.allclose(prepared, reward.scorer.prepare(tall), atol=4 / 255)


def test_what_cannot_be_loaded_says_why(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(model: str, **more: str) -> str:
        with pytest.raises(ValueError) as error:
            genrl_rewards.load("pickscore", {"model": f"open_clip:{model}", **more})
        return str(error.value)

    assert "'laion2b_s32b_b79q' is neither a file nor a checkpoint of ViT-H-14" in said("ViT-H-14/laion2b_s32b_b79q")
    assert "Did you mean 'laion2b_s32b_b79k'" in said("ViT-H-14/laion2b_s32b_b79q")
    assert "nor ARCHITECTURE/WEIGHTS of open_clip. Did you mean 'ViT-H-14'" in said("ViT-H14")
    assert "open_clip cannot load 'nobody/nothing'" in said("nobody/nothing")
    assert "config file missing" in said(str(tmp_path))
    assert "leave processor out" in said(str(folder), processor="somewhere")
    result = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "open_clip" else result(name))
    assert "needs open_clip, which is not installed: pip install 'open_clip_torch" in said(str(folder))


# -- Orient-Anything in the published format: angles from bins, the network by hand, and files that are none
def test_the_network_is_dino_and_two_layers_on_its_class_token(tmp_path: Path) -> None:
    """The layers by hand, from the file; the folder of the hub's layout and the file itself are the same."""
    for bins, rotation in ((180, -30.0), (360, -120.0)):  # angles are the bins with the largest scores
        scores = torch.zeros(360 + 180 + bins + 2)
        scores[35], scores[360 + 100], scores[360 + 180 + 60], scores[-2] = 2.0, 3.0, 4.0, 1.0
        assert orientation_of(scores) == pytest.approx((35.0, 10.0, rotation, 1 / (1 + math.exp(-1))))
    file, backbone = tiny_orient.save(tmp_path)
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 255, (40, 28, 3), dtype=np.uint8)) for _ in range(3)]
    model = OrientAnything(str(tmp_path), str(backbone))
    result = model(pictures)
    assert result == OrientAnything(str(file), str(backbone))(pictures) and len(set(result)) > 1
    held = torch.load(file, weights_only=True)
    pixels = model.processor(images=pictures, return_tensors="pt")["pixel_values"]
    assert torch.equal(model.dino.state_dict()["layernorm.weight"], held["dinov2.layernorm.weight"])
    with torch.no_grad():
        x = model.dino(pixel_values=pixels).last_hidden_state[:, 0]
    for net in ("net1", "net2"):
        linear, norm = (
            {name.rsplit(".", 1)[1]: v for name, v in held.items() if name.startswith(f"down_sampler.{net}.{k}.")}
            for k in (0, 1)
        )
        x = x @ linear["weight"].T + linear["bias"]
        x = (x - norm["running_mean"]) / (norm["running_var"] + 1e-5).sqrt() * norm["weight"] + norm["bias"]
        x = x.clamp_min(0) if net == "net1" else x
    assert [orientation_of(scores)[:3] for scores in x] == [one[:3] for one in result]


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    file, backbone = tiny_orient.save(tmp_path)
    held = torch.load(file, weights_only=True)
    other = tmp_path / "other.pt"

    def refused(weights: dict[str, torch.Tensor], words: str) -> None:
        torch.save(weights, other)
        with pytest.raises(ValueError, match=words):
            OrientAnything(str(other), str(backbone))

    refused({"dinov2.layernorm.bias": torch.ones(3)}, "holds no Orient-Anything")
    refused({k: v for k, v in held.items() if k != "dinov2.layernorm.bias"}, r"does not fit .*layernorm\.bias")
    refused({k: v for k, v in held.items() if k != "down_sampler.net2.0.bias"}, "of another architecture")
    wide = {k: torch.ones(722, 32) if k == "down_sampler.net1.0.weight" else v for k, v in held.items()}
    refused(wide, "was made from a 'dinov2' of width 32; .* is a 'dinov2' of width 16")
    with pytest.raises(ValueError, match=r"has no croplargeEX2/dino_weight\.pt"):
        OrientAnything(str(backbone), str(backbone))
