"""Chunks on single environments, alone and in gymnasium's vector environment."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from genrl.objectives.advantages.episodes import valid_transitions
from genrl.objectives.advantages.gae import executed_mask
from genrl.vla.simulators.chunks import ChunkedEnv


class Walk(gymnasium.Env[np.ndarray, np.ndarray]):
    """A position that actions add to: success at `goal`, a time limit of 5; the reward is the action."""

    def __init__(self, goal: float = 3.0) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.goal, self.position, self.time, self.ended = goal, 0.0, 0, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.position, self.time, self.ended = 0.0, 0, False
        return np.array([self.position]), {}

    def step(self, action: np.ndarray):
        assert not self.ended, "stepped past the end"
        self.position += float(action[0])
        self.time += 1
        success = self.position >= self.goal
        truncated = self.time >= 5 and not success
        self.ended = success or truncated
        return np.array([self.position]), float(action[0]), success, truncated, {"is_success": success}


def chunk(*actions: float) -> np.ndarray:
    return np.array(actions, dtype=np.float32)[:, None]


def test_a_chunk_stops_where_the_episode_ends() -> None:
    env = ChunkedEnv(Walk(), 4)
    assert env.action_space.shape == (4, 1)
    _, info = env.reset()
    assert info["n_executed"] == 0 and info["rewards"].tolist() == [0, 0, 0, 0]
    observation, reward, terminated, truncated, info = env.step(chunk(1, 1, 1, 1))
    assert (observation.item(), reward, terminated, truncated) == (3.0, 3.0, True, False)
    assert info["n_executed"] == 3 and info["rewards"].tolist() == [1, 1, 1, 0] and info["is_success"]
    mask = executed_mask(torch.tensor([info["n_executed"]]), 4)
    assert mask.tolist() == [[True, True, True, False]]


def test_a_time_limit_inside_a_chunk_truncates() -> None:
    env = ChunkedEnv(Walk(), 3)
    env.reset()
    env.step(chunk(0, 0, 0))
    observation, _, terminated, truncated, info = env.step(chunk(0.5, 0.5, 0.5))
    assert observation.item() == 1.0 and (terminated, truncated) == (False, True) and info["n_executed"] == 2


def test_the_vector_environment_keeps_the_contract() -> None:
    """Next-step auto-reset by decisions: final observation with the end, then a row that executes nothing."""
    envs = gymnasium.vector.SyncVectorEnv([lambda goal=goal: ChunkedEnv(Walk(goal), 2) for goal in (1.5, 99.0)])
    envs.reset(seed=0)
    done, counts, positions, totals = [], [], [], []
    for _ in range(5):
        observation, reward, terminated, truncated, info = envs.step(np.full((2, 2, 1), 1.0, dtype=np.float32))
        done.append(terminated | truncated)
        counts.append(info["n_executed"])
        positions.append(observation[:, 0])
        totals.append(reward)
        assert info["rewards"].shape == (2, 2)
    assert np.array(positions).T.tolist() == [[2, 0, 2, 0, 2], [2, 4, 5, 0, 2]]
    assert np.array(counts).T.tolist() == [[2, 0, 2, 0, 2], [2, 2, 1, 0, 2]]
    assert np.array(totals).T.tolist() == [[2, 0, 2, 0, 2], [2, 2, 1, 0, 2]]
    valid = valid_transitions(torch.tensor(np.array(done)), torch.zeros(2, dtype=torch.bool))
    assert torch.equal(valid, torch.tensor(np.array(counts)) > 0)
    envs.close()


def test_what_cannot_be_is_refused() -> None:
    env = ChunkedEnv(Walk(), 2)
    env.reset()
    with pytest.raises(ValueError, match=r"got \[3, 1\]"):
        env.step(chunk(0, 0, 0))
    with pytest.raises(ValueError, match="1 of them not finite"):
        env.step(chunk(0, np.nan))
    missing = ChunkedEnv(Walk(), 2, success_key="success")
    missing.reset()
    with pytest.raises(KeyError, match="set success_key"):
        missing.step(chunk(0, 0))
    with pytest.raises(ValueError, match="at least one"):
        ChunkedEnv(Walk(), 0)
    with pytest.raises(ValueError, match="space of vectors"):
        ChunkedEnv(gymnasium.make("CartPole-v1"), 2)
