"""Demonstrations as frames, supervised losses, and that training is a function of its seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genrl.mdp import ddpm
from genrl.mdp.forward import flow_times
from genrl.mdp.noise import generator, keyed_noise
from genrl.playground.minitable import MiniTable, demonstrate, expert_chunk, task
from genrl.vla.data.frames import STD_FLOOR, frame_statistics
from genrl.vla.offline.imitation import imitate, matching_error
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE, TOKENS, tokenise
from tests.vla.tiny_policies import TOLD, WORDS, flow, frames, minitable_frames


def test_frames_are_what_the_environment_shows_and_what_the_expert_does() -> None:
    """An environment that plays the demonstrated episodes by the expert shows the frames, one after the other."""
    keys, tasks, row = task.episode_keys(0, np.arange(4), np.zeros(4)), (0, 4), 0
    seen = minitable_frames(demonstrate(keys, tasks), image_size=32)
    for key in keys:
        env = MiniTable(1, chunk=1, tasks=tasks)
        shown, _ = env.reset(seed=0, options={"episodes": np.array([key])})
        ended = False
        while not ended:
            assert np.array_equal(seen[IMAGE][row].numpy(), shown["pixels"][0])
            assert np.array_equal(seen[STATE][row].numpy(), shown["agent_pos"][0])
            assert np.array_equal(seen[ENVIRONMENT][row].numpy(), shown["environment_state"][0])
            assert np.array_equal(seen[ACTION][row].numpy(), expert_chunk(env.state, 4)[0])
            assert torch.equal(seen[TOKENS][row], tokenise(env.task_description, WORDS)[0])
            shown, _, terminated, _, _ = env.step(seen[ACTION][row, :1].numpy()[None])
            ended, row = bool(terminated[0]), row + 1
    assert {len(value) for value in seen.values()} == {row}


def test_statistics_have_a_floor_for_states_only() -> None:
    still = {STATE: torch.zeros(5, 2), ACTION: torch.zeros(5, 3), TOKENS: torch.ones(5, 2, dtype=torch.int64)}
    found = frame_statistics(still)
    assert set(found) == {STATE, ACTION}
    assert found[STATE]["std"].tolist() == pytest.approx([STD_FLOOR] * 2) and found[ACTION]["std"].abs().max() == 0


def test_times_are_mostly_noise() -> None:
    """Beta(1.5, 1) has mean 3/5 and P(t < x) = x^1.5."""
    times = flow_times(20000, generator(0))
    assert 0.001 <= times.min() and times.max() <= 1.0
    assert times.mean().item() == pytest.approx(0.999 * 0.6 + 0.001, abs=0.006)
    assert (times < 0.5).float().mean().item() == pytest.approx(0.5**1.5, abs=0.01)


class Knows:
    """Says the noise, or the velocity, of one action exactly."""

    def __init__(self, actions: torch.Tensor, alpha_bars: torch.Tensor) -> None:
        self.actions, self.alpha_bars = actions, alpha_bars

    def velocity(self, context, x, sigma):
        return (x - self.actions) / sigma[:, None, None]


class KnowsNoise:
    """The same of a diffusion policy."""

    train_steps = 20

    def __init__(self, actions, alpha_bars) -> None:
        self.actions, self.alpha_bars = actions, alpha_bars

    def noise(self, context, x, timestep):
        bar = self.alpha_bars[timestep].float()[:, None, None]
        return (x - bar.sqrt() * self.actions) / (1 - bar).sqrt()


def test_the_errors_are_zero_at_the_truth() -> None:
    actions, noise = keyed_noise((6, 4, 3), 1), keyed_noise((6, 4, 3), 2)
    sigma, bars = torch.linspace(0.1, 1.0, 6), ddpm.cosine_alpha_bars(20)
    timestep, truth = torch.tensor([0, 3, 7, 11, 15, 19]), Knows(actions, bars)
    for policy, level in ((truth, sigma), (KnowsNoise(actions, bars), timestep)):
        assert matching_error(policy, {}, actions, noise, level, bars).abs().max() < 1e-4
    off = matching_error(truth, {}, actions + 0.5, noise, torch.ones(6), None)
    torch.testing.assert_close(off, torch.full_like(off, 0.5))  # v = x - a = noise - a; the target is 0.5 less


def test_training_is_reproducible_and_may_be_left() -> None:
    how = {"steps": 6, "batch_size": 8, "learning_rate": 1e-3}
    first, again = (list(imitate(flow(TOLD), frames(), seed=1, **how)) for _ in range(2))
    assert first == again and len(first) == 6
    assert first[:2] == [loss for loss, _ in zip(imitate(flow(TOLD), frames(), seed=1, **how), range(2), strict=False)]
    assert first != list(imitate(flow(TOLD), frames(), seed=2, **how))
    spoilt = frames() | {STATE: frames()[STATE] * torch.nan}
    with pytest.raises(FloatingPointError, match="step 0"):
        next(imitate(flow(TOLD), spoilt, seed=1, **how))
