"""Letterboxes: nothing is distorted, the rest is black, on the side that each family puts it."""

from __future__ import annotations

import pytest
import torch

from genrl.vla.policies.robot import letterbox


@pytest.mark.parametrize(("height", "width"), [(20, 40), (40, 20), (12, 30)])
@pytest.mark.parametrize("padding", ["centre", "top_left"])
def test_a_white_picture_fills_its_part_of_the_square(height: int, width: int, padding) -> None:
    ratio = max(height, width) / 28
    inner = (int(height / ratio), int(width / ratio))
    out = letterbox(torch.ones(2, 3, height, width), (28, 28), padding)
    rows, columns = out[0, 0].amax(1).nonzero()[:, 0], out[0, 0].amax(0).nonzero()[:, 0]
    assert out.shape == (2, 3, 28, 28) and out.sum() == 2 * 3 * inner[0] * inner[1]
    spare = (28 - inner[0], 28 - inner[1])
    first = (spare[0] // 2, spare[1] // 2) if padding == "centre" else spare
    assert (int(rows[0]), int(columns[0])) == first and (len(rows), len(columns)) == inner


def test_a_picture_of_the_right_size_is_left_alone() -> None:
    image = torch.rand(1, 3, 28, 28)
    assert letterbox(image, (28, 28), "centre") is image


def test_halving_averages_neighbours() -> None:
    image = torch.rand(1, 3, 8, 8)
    mean = image.unflatten(2, (4, 2)).unflatten(4, (4, 2)).mean((3, 5))
    torch.testing.assert_close(letterbox(image, (4, 4), "centre"), mean)
