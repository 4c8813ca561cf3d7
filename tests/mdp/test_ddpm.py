"""DPPO's denoising steps: the posterior of DDPM, floors of the std, positions of a chain."""

from __future__ import annotations

import pytest
import torch

from genrl.mdp import ddpm

ALPHA_BARS = ddpm.cosine_alpha_bars(20)


def test_grids() -> None:
    full, leading = ddpm.ddpm_grid(ALPHA_BARS), ddpm.ddim_grid(ALPHA_BARS, 5)
    assert full.timesteps.tolist() == list(range(19, -1, -1)) and leading.timesteps.tolist() == [16, 12, 8, 4, 0]
    for grid in (full, leading):
        assert torch.equal(grid.alpha_bar_next[:-1], grid.alpha_bar[1:]) and grid.alpha_bar_next[-1] == 1
        assert (grid.alpha_bar_next > grid.alpha_bar).all()
    with pytest.raises(ValueError, match="cannot be taken"):
        ddpm.ddim_grid(ALPHA_BARS, 21)


def test_the_last_positions_are_fine_tuned() -> None:
    assert ddpm.fine_tuned(torch.arange(5), 5, 2).tolist() == [False, False, False, True, True]
    assert ddpm.fine_tuned(torch.arange(5), 5, 5).all()
    with pytest.raises(ValueError, match="fine-tuned"):
        ddpm.fine_tuned(torch.arange(5), 5, 6)
