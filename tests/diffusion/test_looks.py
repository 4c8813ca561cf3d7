"""Figures of held-out pictures that no reward has."""

from __future__ import annotations

import pytest
import torch

from genrl.diffusion import looks


def test_confetti_has_high_frequencies_and_a_slope_has_none() -> None:
    slope = torch.linspace(0, 1, 32).expand(2, 3, 32, 32)
    confetti = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert float(looks.high_frequencies(slope)[0]) < 0.01 < 0.2 < float(looks.high_frequencies(confetti)[1])
    video = torch.stack([slope, slope], 1)
    assert torch.allclose(looks.high_frequencies(video), looks.high_frequencies(slope))
    assert looks.thumbnails(video).tolist() == looks.thumbnails(slope).tolist()


def test_one_picture_for_every_noise_has_no_diversity() -> None:
    black, white = torch.zeros(1, 3, 16, 16), torch.ones(1, 3, 16, 16)
    seen, none = looks.thumbnails(torch.cat([black, white, white, white])), torch.zeros(4)
    assert looks.figures(seen, none, [0, 0, 2, 2])["eval/diversity"] == pytest.approx(0.5**0.5 / 2)
    assert looks.figures(seen, none, [0, 1, 2, 2])["eval/diversity"] == 0.0
    assert "eval/diversity" not in looks.figures(seen, none, [0, 1, 2, 3])


def test_how_far_pictures_have_moved() -> None:
    black, white = (looks.thumbnails(torch.full((2, 3, 16, 16), value)) for value in (0.0, 1.0))
    assert looks.moved(black, black) == 0.0 and looks.moved(black, white) == pytest.approx(1.0)
