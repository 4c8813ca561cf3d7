"""`open_clip:MODEL` in the rewards that take a CLIP: open_clip's own numbers, its preparation, its refusals."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import genrl_rewards
from genrl_rewards.scorers.preference.aesthetic import HEAD_FILES, Head
from tests.rewards import tiny_open_clip
from tests.rewards.gradients import assert_gradients_agree
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
def test_scores_are_those_of_open_clips_own_example(
    folder: Path, images: torch.Tensor, form: str, tmp_path: Path
) -> None:
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
def test_gradients_reach_the_picture_through_the_same_preparation(
    images: torch.Tensor, tmp_path: Path, mode: str
) -> None:
    model = tiny_open_clip.save_folder(tmp_path / mode, resize_mode=mode, mean=[0.5] * 3, std=[0.25] * 3)
    reward = genrl_rewards.load("clipscore", {"model": f"open_clip:{model}"})
    assert_gradients_agree(reward, images, PROMPTS, within=0.005)


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
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "open_clip" else found(name))
    assert "needs open_clip, which is not installed: pip install 'open_clip_torch" in said(str(folder))
