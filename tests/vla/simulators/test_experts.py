"""What an expert would do from here: told by the simulator, in every slot, whatever process has it; nothing moves."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genrl.playground.minitable import MiniTable, expert_chunk
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment
from tests.vla.frail import Frail

ROOT = Path(__file__).parents[3]
CORNERS = f"{ROOT}/docs/example_simulator.py:make"
HERE = f"{__file__}"


def test_the_chunks_are_those_of_the_tables_and_move_nothing() -> None:
    """Following them succeeds, and who is done is told nothing."""
    env = MiniTable(5, chunk=4, image_size=0)
    env.reset(seed=1)
    done = np.zeros(5, dtype=np.bool_)
    while not done.any():
        before = env.state
        told = env.expert_chunks(7)
        assert told.shape == (5, 7, 3) and np.array_equal(told, expert_chunk(before, 7))
        assert all(np.array_equal(a, b) for a, b in zip(before, env.state, strict=True))
        done = env.step(told[:, :4])[4]["is_success"]
    assert not done.all(), "nobody would be left to compare with"
    told = env.expert_chunks(4)
    assert not told[done].any() and told[~done].any((1, 2)).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_environment_of_ones_own_is_asked_in_its_process(workers: int) -> None:
    env: Any = open_environment(
        Simulation(CORNERS, num_envs=4, chunk=2, tasks=("red", "blue"), max_steps=30, workers=workers)
    )
    seen, _ = env.reset(seed=0)
    goal = np.array([[0.8 if "red" in text else -0.8, 0.8] for text in env.task_description])
    told = env.expert_chunks(3)
    first = np.clip((goal - seen["agent_pos"]) / 0.2, -1, 1)
    np.testing.assert_allclose(told[:, 0], first, atol=1e-5)
    after, *_ = env.step(told[:, :2])
    np.testing.assert_allclose(after["agent_pos"], seen["agent_pos"] + 0.2 * told[:, :2].sum(1), atol=1e-5)
    env.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            ":without",
            "has no expert; minitable, metaworld, libero, point_maze, fetch, reacher have one, .*expert_chunk",
        ),
        (":too_short", r"expert_chunk\(3\) of .* must be finite numbers \[3, 2\], got \[2, 2\]"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_where_nobody_knows_it_is_said(name: str, message: str, workers: int) -> None:
    env: Any = open_environment(Simulation(HERE + name, num_envs=2, chunk=2, workers=workers))
    env.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        env.expert_chunks(3)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_expert_that_raises_is_told_with_its_episode(workers: int) -> None:
    """Seed and step are those at which it raises again."""
    env: Any = open_environment(Simulation(HERE + ":lost", num_envs=1, chunk=2, workers=workers))
    env.reset(seed=0)
    env.expert_chunks(3)
    env.step(np.zeros((1, 2, 2), dtype=np.float32))
    with pytest.raises(ValueError, match=r"expert_chunk\(3\) of <Lost instance> raised KeyError") as raised:
        env.expert_chunks(3)
    wanted = rf"{Path(__file__).name}, line \d+\): 'the way'.* after 2 actions .*seed=(\d+)"
    found = re.search(wanted, str(raised.value))
    assert found is not None, raised.value
    again = lost()
    again.reset(seed=int(found[1]))
    for _ in range(2):
        again.step(np.zeros(2))
    with pytest.raises(KeyError):
        again.expert_chunk(3)
    env.close()


class Lost(Frail):
    def expert_chunk(self, horizon: int) -> np.ndarray:
        if self.time:
            raise KeyError("the way")
        return np.zeros((horizon, 2))


def lost() -> Lost:
    return Lost()


def without() -> Frail:
    return Frail()


class TooShort(Frail):
    def expert_chunk(self, horizon: int) -> np.ndarray:
        return np.zeros((horizon - 1, 2))


def too_short() -> Frail:
    return TooShort()


@pytest.mark.skipif(importlib.util.find_spec("metaworld") is None, reason="needs Meta-World")
@pytest.mark.parametrize("task", ["push-v3", "drawer-open-v3", "assembly-v3"])
def test_meta_worlds_expert_is_tried_on_a_copy(task: str) -> None:
    """Its chunk is what it does when it is followed, and an episode that is asked about goes on as one that is not."""
    from genrl.vla.simulators.metaworld import MetaWorldEnv

    asked, silent = MetaWorldEnv(task), MetaWorldEnv(task)
    seen = asked.reset(seed=4)[0]["environment_state"]
    silent.reset(seed=4)
    followed: list[np.ndarray] = []
    for t in range(12):
        if t in (0, 5):
            chunk = asked.expert_chunk(6)
            followed = list(chunk)
        action = asked.expert_action(seen)
        if followed:
            np.testing.assert_array_equal(followed.pop(0), action)
        seen = asked.step(action)[0]["environment_state"]
        np.testing.assert_array_equal(seen, silent.step(action)[0]["environment_state"])
