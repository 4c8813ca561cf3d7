"""Costs of gymnasium environments, and bullet-safety-gym's environments as functions of their seeds."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.simulator import find_registered
from genrl.vla.simulators.tables import open_environment

LINE = f"{Path(__file__).parents[1] / 'dangerous_line.py'}:Line"


def line(**changes: Any) -> Simulation:
    told = {"num_envs": 2, "chunk": 3, "max_steps": 9, "reward": "environment", "success_key": None, "cost_key": "cost"}
    return Simulation(LINE, **(told | changes))


def test_costs_of_executed_actions_are_in_info() -> None:
    env = open_environment(line())
    env.reset(seed=0)
    chunk = np.float32([[[1.0], [1.0], [0.5]], [[0.5], [0.5], [0.5]]])
    _, reward, _, _, info = env.step(chunk)
    assert info["costs"].tolist() == [[0.0, 2.0, 2.5], [0.0, 0.0, 1.5]] and reward.tolist() == [2.5, 1.5]
    _, _, terminated, _, info = env.step(np.ones((2, 3, 1), np.float32))
    assert info["costs"].tolist() == [[3.5, 0.0, 0.0], [2.5, 3.5, 0.0]] and terminated.all()
    assert not info["is_success"].any()
    env.step(np.ones((2, 3, 1), np.float32))
    env.close()


def test_a_wrong_key_is_refused_and_so_are_costs_where_there_are_none() -> None:
    env = open_environment(line(cost_key="costs"))
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"no 'costs' in its info, only \['cost'\]: set environment.cost_key"):
        env.step(np.ones((2, 3, 1), np.float32))
    silent = open_environment(line(cost_key=None))
    silent.reset(seed=0)
    assert "costs" not in silent.step(np.ones((2, 3, 1), np.float32))[-1]
    with pytest.raises(ValueError, match="environment.cost_key: minitable knows no costs"):
        open_environment(Simulation("minitable", num_envs=1, chunk=1, cost_key="cost"))


bullet = pytest.mark.skipif(
    importlib.util.find_spec("bullet_safety_gym") is None or importlib.util.find_spec("pybullet") is None,
    reason="needs `pip install pybullet` and `pip install --no-deps bullet-safety-gym`",
)


@bullet
@pytest.mark.parametrize("name", ["SafetyCarRun-v0", "SafetyBallPush-v0"])
def test_an_episode_is_a_function_of_its_seed(name: str) -> None:
    """Whatever was run before, in the same environment or another, and whoever else draws: a car keeps the targets of
    its motors over a restored state, a pushed ball's goals are drawn while it acts."""
    from genrl.vla.simulators import bullet_safety

    spec = find_registered(name)
    one, other = (bullet_safety.environment(spec, 25, {}) for _ in range(2))

    def episode(env: Any, seed: int) -> np.ndarray:
        actions = np.random.default_rng(seed).uniform(-1, 1, (25, *env.action_space.shape)).astype(np.float32)
        seen = [env.reset(seed=seed)[0]]
        for action in actions:
            observation, reward, _, truncated, info = env.step(action)
            assert info["cost"] in (0, 1)
            seen.append(observation)
            np.random.rand(), random.random()
        assert truncated
        return np.stack(seen)

    np.random.seed(7)
    first = episode(one, 3)
    another = episode(one, 4)
    assert np.array_equal(first, episode(one, 3)) and np.array_equal(first, episode(other, 3))
    assert not np.array_equal(first, another)
    after = np.random.rand()
    np.random.seed(7)
    assert np.random.rand(101)[100] == after  # of the 100 actions above; the episodes took none
    one.close(), other.close()
