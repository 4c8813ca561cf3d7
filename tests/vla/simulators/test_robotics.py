"""Fetch, PointMaze and Reacher: their experts, their independence of one another; and costs of gymnasium environments,
and bullet-safety-gym's as functions of their seeds."""

import importlib.util
import random
from typing import Any

import gymnasium
import numpy as np
import pytest

from genrl.vla.data.demonstrations import demonstrated
from genrl.vla.simulators.contract import Misuse, Simulation
from genrl.vla.simulators.robotics.env import RoboticsEnv
from genrl.vla.simulators.robotics.families import FORE, UPPER, FetchEnv, PointMazeEnv, ReacherEnv, posture, steps_to
from genrl.vla.simulators.simulator import find_registered, headless
from genrl.vla.simulators.tables import open_environment
from tests.vla import frail

headless()
installed = pytest.mark.skipif(
    importlib.util.find_spec("gymnasium_robotics") is None,
    reason="needs gymnasium-robotics: pip install 'genrl-diffusion[robotics]'",
)
EVERY = [(family, task) for family in (PointMazeEnv, FetchEnv, ReacherEnv) for task in family.tasks]


def played(env: RoboticsEnv, seed: int) -> int | None:
    seen, _ = env.reset(seed=seed)
    for count in range(env.tasks[env.task].max_steps):
        seen, _, _, _, info = env.step(np.clip(env.expert(seen), -1, 1).astype(np.float32))
        if info["success"]:
            return count + 1
    return None


@installed
@pytest.mark.parametrize(("family", "task"), EVERY)
def test_the_expert_succeeds(family: type[RoboticsEnv], task: str) -> None:
    env = family(task)
    assert [seed for seed in range(4) if played(env, seed) is None] == []


@installed
@pytest.mark.parametrize(("family", "task"), EVERY)
def test_the_experts_chunk_is_tried_on_a_copy(family: type[RoboticsEnv], task: str) -> None:
    asked, silent = family(task), family(task)
    seen, other = asked.reset(seed=4)[0], silent.reset(seed=4)[0]
    followed: list[np.ndarray] = []
    for t in range(20):
        if t in (0, 7):
            followed = list(asked.expert_chunk(6))
        action = np.clip(asked.expert(seen), -1, 1).astype(np.float32)
        if followed:
            np.testing.assert_array_equal(followed.pop(0), action)
        seen, other = asked.step(action)[0], silent.step(action)[0]
        assert all((seen[name] == other[name]).all() for name in seen)


@installed
@pytest.mark.parametrize(("family", "task"), [(PointMazeEnv, "umaze"), (FetchEnv, "push"), (FetchEnv, "reach")])
def test_an_episode_is_the_packages_own_whatever_runs_beside_it(family: type[RoboticsEnv], task: str) -> None:
    """Two slots take turns in one model, with pictures in between; a third environment is the package's own."""
    one, other = family(task), family(task)
    own: Any = gymnasium.make(find_registered(family.tasks[task].id), disable_env_checker=True).unwrapped
    success = "success" if family is PointMazeEnv else "is_success"
    actions = np.random.default_rng(0).uniform(-1, 1, (12, *one.action_space.shape)).astype(np.float32)
    one.reset(seed=9)
    one.step(actions[0])
    seen, raw = one.reset(seed=5)[0], own.reset(seed=5)[0]
    other.reset(seed=6)
    for action in actions:
        assert np.array_equal(seen["environment_state"][-raw["desired_goal"].size :], raw["desired_goal"])
        assert np.isin(seen["agent_pos"], raw["observation"]).all()
        other.step(-action)
        one.picture(32)
        seen, reward, _, _, info = one.step(action)
        raw, paid, _, _, facts = own.step(action.astype(np.float64))
        assert reward == paid and info == {"success": bool(facts[success])}
    assert not np.array_equal(seen["agent_pos"], other.step(actions[0])[0]["agent_pos"])


def test_a_shortest_way_and_a_posture_that_touches_its_target() -> None:
    """Where the arm can: not beyond its reach, nor nearer to its root than the second joint can be bent."""
    for radius in (0.03, 0.1, 0.2):
        for angle in np.linspace(-3.0, 3.0, 7):
            target = radius * np.array([np.cos(angle), np.sin(angle)])
            first, second = posture(target)
            tip = [UPPER * turn(first) + FORE * turn(first + second) for turn in (np.cos, np.sin)]
            np.testing.assert_allclose(tip, target, atol=1e-9)
            assert 0.0 <= second <= 3.0
    assert posture(np.array([0.5, 0.0]))[1] == 0.0 and posture(np.array([1e-3, 0.0]))[1] == pytest.approx(3.0)
    walls = tuple(tuple(cell == "#" for cell in row) for row in ("#####", "#...#", "###.#", "#...#", "#####"))
    following = steps_to(walls, (3, 1))
    way = [(1, 1)]
    while way[-1] != (3, 1):
        way.append(following[way[-1]])
    assert way == [(1, 1), (1, 2), (1, 3), (2, 3), (3, 3), (3, 2), (3, 1)]
    assert (0, 0) not in following and (2, 1) not in following


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mujoco", None)
    from genrl.vla.simulators.robotics import env

    with pytest.raises(Misuse, match="FetchReach-v4 needs mujoco: pip install 'gymnasium-robotics"):
        env.Shared("FetchReach-v4")
    with pytest.raises(ValueError, match="gym_pusht/PushT-v0 has no scripted expert.*fetch, reacher have one"):
        demonstrated("gym_pusht/PushT-v0", (), 1, seed=0)


LINE = f"{frail.__file__}:Line"


def line(**changes: Any) -> Simulation:
    base = {"num_envs": 2, "chunk": 3, "max_steps": 9, "reward": "environment", "success_key": None, "cost_key": "cost"}
    return Simulation(LINE, **(base | changes))


def test_costs_of_executed_actions_are_in_info_or_their_key_is_refused() -> None:
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
