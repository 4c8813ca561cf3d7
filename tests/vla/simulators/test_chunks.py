"""Chunks on single environments: they stop where the episode ends, and say what was executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from genrl.objectives.episodes import executed_mask
from genrl.vla.simulators.contract import Fault, Misuse, Outcome, Reading, Run
from genrl.vla.simulators.simulator import Simulator, gymnasium_host, named


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


def begun(chunk: int, **how: Any) -> Simulator:
    simulator = Simulator(Walk(), Reading(chunk=chunk, reward="environment", **how))
    first = simulator.begin(0)
    assert first.n_executed[0] == 0 and first.rewards.tolist() == [[0.0] * chunk]
    assert facts(first) == [0.0, False, False]
    return simulator


def facts(outcome: Outcome) -> list[Any]:
    """Where it stands, whether the episode terminated, whether it was truncated."""
    return [outcome.observation["agent_pos"].item(), bool(outcome.terminated[0]), bool(outcome.truncated[0])]


def test_a_chunk_stops_where_the_episode_ends_or_at_a_limit_of_our_own() -> None:
    outcome = begun(4).execute(chunk(1, 1, 1, 1))
    assert facts(outcome) == [3.0, True, False] and outcome.success[0]
    assert outcome.n_executed[0] == 3 and outcome.rewards.tolist() == [[1, 1, 1, 0]] and outcome.action_dim == 1
    mask = executed_mask(torch.from_numpy(outcome.n_executed), 4)
    assert mask.tolist() == [[True, True, True, False]]
    assert facts(begun(4, max_steps=2).execute(chunk(0, 0, 0, 0))) == [0.0, False, True]
    outcome = begun(4, max_steps=3).execute(chunk(1, 1, 1, 1))
    assert facts(outcome) == [3.0, True, False] and outcome.n_executed[0] == 3
    outcome = begun(2).execute(chunk(9, -4))  # clipped to the box
    assert facts(outcome) == [0.0, False, False] and outcome.rewards.tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize("limit", [None, 5, 9])
def test_a_time_limit_inside_a_chunk_truncates(limit: int | None) -> None:
    simulator = begun(3, max_steps=limit)
    simulator.execute(chunk(0, 0, 0))
    outcome = simulator.execute(chunk(0.5, 0.5, 0.5))
    assert facts(outcome) == [1.0, False, True] and outcome.n_executed[0] == 2
    again = simulator.begin(1)
    assert facts(again) == [0.0, False, False]
    assert facts(simulator.execute(chunk(1, 1, 1))) == [3.0, True, False]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(Misuse, match="set environment.success_key"):
        begun(2, success_key="success").execute(chunk(0, 0))
    with pytest.raises(Misuse, match="space of vectors"):
        Simulator(gymnasium.make("CartPole-v1"), Reading(chunk=2))
    with pytest.raises(Misuse, match=r"mine, agent_pos is <U1 \[2\], no numbers"):
        named({"agent_pos": ["1", "2"]}, 0, "mine")


def said(info: dict[str, Any], *, always: bool = False, ends: Any = 0, **how: Any) -> Outcome:
    """Of a walk that says this at the end, or in every step; ends: what it returns for the end, where that is not 0."""

    class Says(Walk):
        def step(self, action: np.ndarray):
            raw, reward, terminated, truncated, _ = super().step(action)
            says = info if always or terminated or truncated else {}
            return raw, reward, terminated if ends == 0 else ends, truncated, says

    simulator = Simulator(Says(), Reading(chunk=5, reward="environment", **how))
    simulator.begin(0)
    return simulator.execute(chunk(1, 1, 1, 1, 1))


@pytest.mark.parametrize(("says", "right"), [(True, True), (np.bool_(False), False), (1, True), (np.float32(0), False)])
def test_success_may_be_said_at_the_end_alone(says: Any, right: bool) -> None:
    assert said({"is_success": says}).success.tolist() == [right]


@pytest.mark.parametrize("value", [0.3, float("nan"), 2, "yes", [True, False], None])
def test_what_is_no_success_is_not_cast(value: Any) -> None:
    """Nor the end of an episode."""
    with pytest.raises(Misuse, match="success is true or false|no finite number"):
        said({"is_success": value}, always=True)
    with pytest.raises(Misuse, match="fourth value that step returns is .* and it is true or false"):
        said({"is_success": False}, always=True, ends=value)


def test_an_end_that_says_nothing_is_no_failure() -> None:
    for limit in (None, 2):
        with pytest.raises(Misuse, match=r"only \['other'\]: set environment.success_key"):
            said({"other": 1}, always=True, max_steps=limit)


def test_a_function_that_takes_other_settings_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def make(task): ...\n")
    host = gymnasium_host(1, name=f"{tmp_path / 'own.py'}:make", reading=Reading(chunk=2), settings={"size": 3})
    (fault,) = host.run(Run({0: 0}, {}))
    assert isinstance(fault, Fault) and fault.misuse
    assert "is defined as make(task), and called with environment.args {'size': 3}" in fault.report
