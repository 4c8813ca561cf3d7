"""JPEG size against golden bytes; sharpness and saturation on pictures whose value is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import features

import genrl_rewards
from genrl_rewards.scorers.pictures.statistics import jpeg, saturation, sharpness

Golden = Callable[[str], np.lib.npyio.NpzFile]


def as_tensor(picture: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(picture).permute(2, 0, 1)[None].double() / 255


@pytest.mark.parametrize(
    ("scale", "column"),
    [
        ("incompressibility", "incompressibility_kB"),
        ("compressibility", "compressibility_ddpo"),
        ("compressibility_500", "compressibility_flow_grpo"),
    ],
)
def test_jpeg_equals_the_golden_sizes(golden: Golden, scale: str, column: str) -> None:
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
