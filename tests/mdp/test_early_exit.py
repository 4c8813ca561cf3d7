"""Talk2Move's steps: golden talk2move_rewards (its exit step and call counts; the rewards are tested with theirs)."""

from __future__ import annotations

import pytest
import torch

from genrl.diffusion.methods.talk2move import train as early_exit
from genrl.mdp import schedules
from tests.golden_cases import Arrays
from tests.reference.grids import shifted_grid

NAN = float("nan")


def test_golden_exit_step_and_calls(golden) -> None:
    a = Arrays(golden("talk2move_rewards"))
    rewards = a.given("exit_rewards_prompt_step_sample")
    a.check("exit_variance_per_step", early_exit.exit_variance(rewards))
    a.check("exit_step", early_exit.exit_step(rewards))
    for length, exit_step, shortcut, calls in a.given("active_T_K_shortcut_nfe").tolist():
        assert exit_step + shortcut == calls
        grid = schedules.linspace_grid(length)
        assert len(early_exit.shortcut_sigmas(grid, exit_step, shortcut)) - 1 == calls - exit_step
    a.all_used("(exit|active)_.*")


def test_missing_scores_are_left_out() -> None:
    rewards = torch.tensor([[[1.0, 3.0, NAN], [5.0, NAN, NAN]], [[NAN, NAN, NAN], [2.0, 2.0, 2.0]]])
    assert early_exit.exit_variance(rewards).tolist() == [1.0, 0.0]
    assert early_exit.exit_step(torch.full((1, 3, 2), NAN)) == 0


def test_the_shortcut_goes_evenly_to_no_noise() -> None:
    grid = shifted_grid(10, 3.0)
    path = early_exit.shortcut_sigmas(grid, 4, 2)
    assert path[0] == grid[4] and path[-1] == 0 and torch.allclose(path.diff(), -grid[4] / 2)


def test_impossible_exits_are_refused() -> None:
    grid = schedules.linspace_grid(10)
    for exit_step in (0, 11):
        with pytest.raises(ValueError, match="must be in 1 .. 10"):
            early_exit.shortcut_sigmas(grid, exit_step, 2)
    with pytest.raises(ValueError, match="at least one step, got 0"):
        early_exit.shortcut_sigmas(grid, 4, 0)
    with pytest.raises(ValueError, match="no shortcut, got 2"):
        early_exit.shortcut_sigmas(grid, 10, 2)
    with pytest.raises(ValueError, match=r"\[prompts, exit steps, samples\]"):
        early_exit.exit_variance(torch.zeros(3, 4))
