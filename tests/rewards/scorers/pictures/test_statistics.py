"""JPEG size against golden bytes; sharpness and saturation on pictures whose value is known."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import features

import genrl_rewards
from genrl_rewards.scorers.pictures.statistics import jpeg, saturation, sharpness
from genrl_rewards.scorers.pictures.video import motion, smoothness, spread, steadiness
from tests.rewards import tiny_vlm  # first: it makes transformers importable beside any torchvision
from tests.rewards.asking import refused, scored

from transformers import Dinov2Config, Dinov2Model  # isort: skip
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil  # isort: skip

from PIL import Image

from genrl_rewards.models import torchvision_compat


def as_tensor(picture: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(picture).permute(2, 0, 1)[None].double() / 255


def test_jpeg_equals_the_golden_sizes(golden: Callable[[str], Any]) -> None:
    for scale, column in (
        ("incompressibility", "incompressibility_kB"),
        ("compressibility", "compressibility_ddpo"),
        ("compressibility_500", "compressibility_flow_grpo"),
    ):
        data = golden("rewards_jpeg")
        scores = torch.cat([jpeg(as_tensor(data[f"image/{name}"]), scale) for name in data["names"]])
        same_library = features.version_feature("libjpeg_turbo") == str(data["libjpeg"]).rpartition("=")[2]
        np.testing.assert_allclose(scores, data[column], rtol=1e-12 if same_library else 0.02)
        for name, count in zip(data["names"], data["bytes_q95"], strict=True):
            size = jpeg(as_tensor(data[f"image/{name}"])).item() * 1000
            assert size == pytest.approx(count, rel=1e-12 if same_library else 0.02)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_flat_pictures(red: float, green: float, blue: float) -> None:
    image = torch.tensor([red, green, blue], dtype=torch.float64).view(1, 3, 1, 1).expand(1, 3, 6, 7)
    assert sharpness(image).item() == pytest.approx(0, abs=1e-20)
    high, low = max(red, green, blue), min(red, green, blue)
    assert saturation(image).item() == pytest.approx((high - low) / max(high, 1e-6), abs=1e-9)


def test_sharpness_of_a_chessboard_and_of_its_blur() -> None:
    board = (torch.arange(8)[:, None] + torch.arange(8)[None]) % 2
    image = board.double().expand(1, 3, 8, 8)
    assert sharpness(image).item() == pytest.approx(16)  # the Laplacian is +4 and -4 in turn
    blurred = torch.nn.functional.avg_pool2d(image, 3, 1, 1)
    assert sharpness(blurred).item() < 1


@pytest.mark.parametrize("name", ["jpeg", "sharpness", "saturation"])
def test_a_video_scores_the_mean_of_its_frames(name: str) -> None:
    reward = genrl_rewards.load(name)
    video = torch.rand(2, 3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    scores = genrl_rewards.score(reward, images=video, prompts=["", ""]).values
    for i in range(2):
        frames = genrl_rewards.score(reward, images=video[i], prompts=[""] * 3).values
        assert scores[i] == pytest.approx(sum(frames) / 3, rel=1e-6)
    if name == "jpeg":
        with pytest.raises(ValueError, match="jpeg: unknown scale 'compressability'. Did you mean 'compressibility'"):
            jpeg(video[0], "compressability")
        return
    leaf = video[0].clone().requires_grad_()
    genrl_rewards.score_with_gradients(reward, images=leaf, prompts=[""] * 3).sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all() and leaf.grad.abs().sum() > 0


# -- The gate: the probability of a classifier's label, of a video's worst frame
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    labels = {"id2label": {0: "normal", 1: "nsfw"}, "num_labels": 2}
    model = ViTForImageClassification(ViTConfig(**sizes, **labels, image_size=32, patch_size=8))
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
    unsafe = genrl_rewards.load("safe", {"model": folder, "label": "nsfw"})
    other = genrl_rewards.score(unsafe, images=images, prompts=[""] * 4)
    assert other.values == pytest.approx(wanted[:, 1].tolist(), abs=1e-6)
    video = genrl_rewards.score(reward, images=images.view(2, 2, 3, 40, 48), prompts=[""] * 2)
    refused("has no label 'normall'. Did you mean 'normal'", "safe", {"model": folder, "label": "normall"})
    assert video.values == pytest.approx(wanted[:, 0].view(2, 2).amin(1).tolist(), abs=1e-6)


# -- Rewards of videos: frames of a picture's reward, motion of a square that moves, what stays the same
FIRST = """
async def first(pil_images, prompts, colour, scale=(1, 1)):
    levels = [None if c == "none" else k * p.getpixel((0, 0))[0] / 255 for p, c, k in zip(pil_images, colour, scale)]
    return levels, {"sides": [p.width for p in pil_images]}

def together(images, group):
    return [0.0] * len(images)
"""


def moving(step: float, frames: int = 4, size: int = 64) -> torch.Tensor:
    """A textured picture that is shifted to the right by `step` pixels a frame, without a seam; [1, F, 3, H, W]."""
    x = torch.arange(size, dtype=torch.float32)
    shown = []
    for k in range(frames):
        along, down = (x - k * step)[None, :], x[:, None]
        wave = torch.sin(2 * math.pi * along / 32) * torch.cos(2 * math.pi * down / 16)
        shown.append((0.5 + 0.4 * wave).expand(3, size, size))
    return torch.stack(shown)[None]


@pytest.fixture
def first(tmp_path: Path) -> str:
    (tmp_path / "first.py").write_text(FIRST)
    return f"{tmp_path / 'first.py'}:first"


def test_a_pictures_reward_is_taken_on_frames(first: str) -> None:
    assert [spread(n, of) for n, of in ((4, 10), (2, 5), (1, 5), (9, 3))] == [[0, 3, 6, 9], [0, 4], [2], [0, 1, 2]]
    levels = torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.9], [0.5, 0.5, 0.4, 0.5, 0.6]])
    video = levels[:, :, None, None, None].expand(2, 5, 3, 4, 4)
    columns = {"colour": ["red", "none"], "scale": [10, 1]}
    for reduce, value in (("mean", 10 * (0.0 + 0.2 + 0.9) / 3), ("min", 0.0)):
        reward = genrl_rewards.load("per_frame", {"reward": first, "frames": 3, "reduce": reduce})
        assert set(genrl_rewards.needs(reward).names) == {"images", "prompts", "colour"}
        scores = scored(reward, images=video, prompts=["", ""], columns=columns)
        assert scores.values[0] == pytest.approx(value, abs=0.02) and math.isnan(scores.values[1])
        assert scores.parts == {"sides": [4, 4]}
    with pytest.raises(ValueError, match="compares the samples of a group, which frames are not"):
        genrl_rewards.load("per_frame", {"reward": first.replace(":first", ":together")})
    refused("unknown reduce 'max'", "per_frame", {"reward": "sharpness", "reduce": "max"})
    for name in ("motion", "steadiness"):
        scores = genrl_rewards.score(genrl_rewards.load(name), images=torch.zeros(1, 3, 8, 8), prompts=[""])
        assert "needs videos" in scores.failures[0].error


@pytest.mark.parametrize("step", [0.0, 1.0, 2.0])
def test_motion_is_the_shift_as_a_share_of_the_side(step: float) -> None:
    pytest.importorskip("cv2", reason="the extra is not installed: pip install 'genrl-diffusion[ocr]'")
    assert motion(moving(step)).item() == pytest.approx(step / 64, abs=0.3 / 64 if step else 1e-6)


def test_smooth_motion_is_foreseen_and_a_jerk_is_not() -> None:
    pytest.importorskip("cv2", reason="the extra is not installed: pip install 'genrl-diffusion[ocr]'")
    assert smoothness(moving(0.0, frames=5)).item() == pytest.approx(1, abs=1e-6)
    even = moving(2.0, frames=5)
    jerk = torch.cat([even[:, :1], moving(8.0, frames=5)[:, 1:2], even[:, 2:]], 1)
    assert smoothness(even).item() > 0.97 and smoothness(jerk).item() < smoothness(even).item() - 0.05
    scores = genrl_rewards.score(genrl_rewards.load("smoothness"), images=even[:, :2], prompts=[""])
    assert "at least 3 frames" in scores.failures[0].error


def test_steadiness_falls_with_flicker_and_is_differentiable() -> None:
    still = moving(0.0)
    assert steadiness(still).item() == 1
    flicker = still + 0.2 * (torch.arange(4) % 2)[None, :, None, None, None]
    assert steadiness(flicker).item() == pytest.approx(0.8, abs=1e-6)
    leaf = moving(1.0).requires_grad_()
    genrl_rewards.score_with_gradients(genrl_rewards.load("steadiness"), images=leaf, prompts=[""]).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0


def test_a_still_is_consistent_and_a_cut_is_not(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8, "image_size": 32}
    tiny_vlm.randomise(model := Dinov2Model(Dinov2Config(**sizes)))
    model.save_pretrained(tmp_path)
    reward = genrl_rewards.load("video_consistency", {"model": str(tmp_path), "size": 32})
    one, other = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    video = torch.stack([torch.stack([one, one, one]), torch.stack([one, one, other])])
    scores = scored(reward, images=video, prompts=["", ""])
    tokens = reward.dino.features(torch.stack([one, other])).class_token
    cut = torch.cosine_similarity(tokens[0], tokens[1], dim=0).item()
    assert scores.values[0] == pytest.approx(1, abs=1e-5) and cut < 0.99
    assert scores.values[1] == pytest.approx((1 + cut) / 2, abs=1e-5)


# -- SSIM where it is known; what LPIPS needs is said before any work
@pytest.fixture
def images() -> torch.Tensor:
    pytest.importorskip("torchmetrics", reason="the extra is not installed: pip install 'genrl-diffusion[similarity]'")
    return rewards_picture(torch.rand(2, 3, 5, 6, generator=torch.Generator().manual_seed(0)))


def rewards_picture(small: torch.Tensor) -> torch.Tensor:
    """Smooth pictures in 8 bit."""
    large = torch.nn.functional.interpolate(small, (40, 48), mode="bicubic").clamp(0, 1)
    return (large * 255).round() / 255


def references(folder: Path, *images: torch.Tensor) -> dict[str, list[str]]:
    for i, picture in enumerate(images):
        genrl_rewards.to_pil(picture[None])[0].save(folder / f"{i}.png")
    return {"reference_image": [str(folder / f"{i}.png") for i in range(len(images))]}


def test_ssim_of_flat_noisy_and_equal_pictures(images: torch.Tensor, tmp_path: Path) -> None:
    noisy = (images + 0.1 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    reward = genrl_rewards.load("similarity")
    scores = scored(reward, images=noisy, prompts=["", ""], columns=references(tmp_path, *images))
    same = genrl_rewards.score(reward, images=images, prompts=["", ""], columns=references(tmp_path, *images)).values
    assert same == pytest.approx([1, 1], abs=1e-5) and max(scores.values) < 0.9
    one, other = torch.full((1, 3, 40, 48), 0.2), torch.full((1, 3, 40, 48), 0.8)
    flat = genrl_rewards.score(reward, images=one, prompts=[""], columns=references(tmp_path, *other)).values
    assert flat == pytest.approx([(2 * 0.2 * 0.8 + 1e-4) / (0.2**2 + 0.8**2 + 1e-4)], abs=1e-4)  # without any variance


def test_sizes_videos_and_gradients(images: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward, columns = genrl_rewards.load("similarity"), references(tmp_path, *images)
    Image.open(columns["reference_image"][0]).resize((96, 80), Image.Resampling.BICUBIC).save(tmp_path / "large.png")

    def score(shown: torch.Tensor, name: str = "0.png") -> float:
        given = {"reference_image": [str(tmp_path / name)]}
        return genrl_rewards.score(reward, images=shown[None], prompts=[""], columns=given).values[0]

    assert score(images[0], "large.png") > 0.97
    assert score(images) == pytest.approx((score(images[0]) + score(images[1])) / 2, abs=1e-5)
    leaf = images.flip(0).clone().requires_grad_()
    genrl_rewards.score_with_gradients(reward, images=leaf, prompts=["", ""], columns=columns).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    monkeypatch.setattr(torchvision_compat, "ensure", lambda: "absent")
    refused("the metric 'lpips' needs torchvision", "similarity", {"metric": "lpips"})
    refused("unknown metric 'sssim'. Did you mean 'ssim'", "similarity", {"metric": "sssim"})
