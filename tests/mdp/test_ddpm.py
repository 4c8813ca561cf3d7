"""DPPO's denoising steps: the posterior of DDPM, floors of the std, positions of a chain."""

from __future__ import annotations

import pytest
import torch

from genrl.mdp import ddpm, noise
from genrl.mdp.kernels import Transition

ALPHA_BARS = ddpm.cosine_alpha_bars(20)


def test_rows_at_their_own_positions_are_the_rows_one_by_one() -> None:
    grid = ddpm.ddim_grid(ALPHA_BARS, 5)
    x, prediction = (noise.keyed_noise((5, 4, 3), seed) for seed in (3, 4))
    index = torch.tensor([4, 0, 2, 1, 3])
    together = ddpm.denoise(x, prediction, grid, index, eta=0.7)
    for row, place in enumerate(index.tolist()):
        alone = ddpm.denoise(x[row : row + 1], prediction[row : row + 1], grid, place, eta=0.7)
        assert torch.equal(alone.mean[0], together.mean[row]) and torch.equal(alone.std[0], together.std[row])


def test_grids() -> None:
    full, leading = ddpm.ddpm_grid(ALPHA_BARS), ddpm.ddim_grid(ALPHA_BARS, 5)
    assert full.timesteps.tolist() == list(range(19, -1, -1)) and leading.timesteps.tolist() == [16, 12, 8, 4, 0]
    for grid in (full, leading):
        assert torch.equal(grid.alpha_bar_next[:-1], grid.alpha_bar[1:]) and grid.alpha_bar_next[-1] == 1
        assert (grid.alpha_bar_next > grid.alpha_bar).all()
    with pytest.raises(ValueError, match="cannot be taken"):
        ddpm.ddim_grid(ALPHA_BARS, 21)


def test_a_floor_makes_every_step_a_policy() -> None:
    step = ddpm.with_floor(Transition(torch.zeros(3, 1, 1), torch.tensor([0.0, 0.05, 0.4]).view(3, 1, 1)), 0.1)
    assert step.std.flatten().tolist() == pytest.approx([0.1, 0.1, 0.4])


def test_the_last_positions_are_fine_tuned() -> None:
    assert ddpm.fine_tuned(torch.arange(5), 5, 2).tolist() == [False, False, False, True, True]
    assert ddpm.fine_tuned(torch.arange(5), 5, 5).all()
    with pytest.raises(ValueError, match="fine-tuned"):
        ddpm.fine_tuned(torch.arange(5), 5, 6)
