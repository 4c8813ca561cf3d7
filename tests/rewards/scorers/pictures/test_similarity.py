"""SSIM against its definition; what LPIPS needs is said before any work."""

from pathlib import Path

import pytest
import torch
from PIL import Image

import genrl_rewards
from genrl_rewards.models import torchvision_compat
from tests.rewards.asking import refused, scored

pytest.importorskip("torchmetrics", reason="the extra is not installed: pip install 'genrl-diffusion[similarity]'")


@pytest.fixture
def images() -> torch.Tensor:
    return rewards_picture(torch.rand(2, 3, 5, 6, generator=torch.Generator().manual_seed(0)))


def rewards_picture(small: torch.Tensor) -> torch.Tensor:
    """Smooth pictures in 8 bit."""
    large = torch.nn.functional.interpolate(small, (40, 48), mode="bicubic").clamp(0, 1)
    return (large * 255).round() / 255


def saved(folder: Path, *images: torch.Tensor) -> dict[str, list[str]]:
    for i, picture in enumerate(images):
        genrl_rewards.to_pil(picture[None])[0].save(folder / f"{i}.png")
    return {"reference_image": [str(folder / f"{i}.png") for i in range(len(images))]}


def by_definition(a: torch.Tensor, b: torch.Tensor) -> float:
    """Equation 13 of the paper with its Gaussian window (11 pixels, spread 1.5), borders mirrored."""
    steps = torch.arange(11, dtype=torch.float64) - 5
    line = torch.exp(-(steps**2) / (2 * 1.5**2))
    window = (line[:, None] * line[None] / line.sum() ** 2)[None, None]

    def mean(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(
            torch.nn.functional.pad(x.double()[None], [5] * 4, mode="reflect")[0][:, None], window
        )

    ma, mb = mean(a), mean(b)
    va, vb, cov = mean(a * a) - ma**2, mean(b * b) - mb**2, mean(a * b) - ma * mb
    c1, c2 = 0.01**2, 0.03**2
    return (((2 * ma * mb + c1) * (2 * cov + c2)) / ((ma**2 + mb**2 + c1) * (va + vb + c2))).mean().item()


def test_ssim_is_its_definition(images: torch.Tensor, tmp_path: Path) -> None:
    noisy = (images + 0.1 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    reward = genrl_rewards.load("similarity")
    scores = scored(reward, images=noisy, prompts=["", ""], columns=saved(tmp_path, *images))
    for i in range(2):
        assert scores.values[i] == pytest.approx(by_definition(noisy[i], images[i]), abs=1e-4)
    same = genrl_rewards.score(reward, images=images, prompts=["", ""], columns=saved(tmp_path, *images)).values
    assert same == pytest.approx([1, 1], abs=1e-5) and max(scores.values) < 0.9


def test_sizes_videos_and_gradients(images: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward, columns = genrl_rewards.load("similarity"), saved(tmp_path, *images)
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
