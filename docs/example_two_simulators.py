"""Two simulators in one run: tasks of which each is an environment of its own.

environment: {name: docs/example_two_simulators.py:make, tasks: [red, car], max_steps: 200}

`python docs/example_two_simulators.py FOLDER` writes demonstrations of both.
"""

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from example_simulator import Corner
from gymnasium import spaces

STATES, ACTIONS = 2, 2


class Alike(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment with the run's number of states and actions: zeros are added to what it shows, and of an action
    the first numbers are its own."""

    def __init__(self, env: gymnasium.Env[Any, Any], task_description: str) -> None:
        super().__init__(env)
        self.task_description = task_description
        self.action_space = spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)

    def reset(self, **how: Any) -> Any:
        """Begin an episode."""
        seen, info = self.env.reset(**how)
        return self.named(seen), info

    def step(self, action: np.ndarray) -> Any:
        """One action; what ends an episode here is its success."""
        seen, reward, terminated, truncated, info = self.env.step(action[: self.env.action_space.shape[0]])
        return self.named(seen), reward, terminated, truncated, info | {"is_success": terminated}

    def named(self, seen: Any) -> dict[str, np.ndarray]:
        """By LeRobot's names, with zeros."""
        numbers = seen["agent_pos"] if isinstance(seen, dict) else seen
        state = np.pad(numbers, (0, STATES - len(numbers))).astype(np.float32)
        return {"agent_pos": state, "environment_state": state}


def make(task: str) -> gymnasium.Env[Any, Any]:
    """Called once per slot and task, in the process that has the slot."""
    if task == "car":
        return Alike(gymnasium.make("MountainCarContinuous-v0"), "drive up the hill")
    return Alike(Corner(task), f"go to the {task} corner")


def expert(env: Any, state: np.ndarray) -> np.ndarray:
    """The next action: straight to the corner, or all power in the direction in which the car moves."""
    if isinstance(env.unwrapped, Corner):
        return env.unwrapped.expert_chunk(1)[0]
    return np.array([1.0 if state[1] >= 0 else -1.0, 0.0], dtype=np.float32)


def record(task: str, seed: int):
    """A demonstration: row t holds what was seen before action t, the action, and what came of it."""
    from genrl.vla.data.lerobot_dataset import Episode

    env, rows, done = make(task), [], False
    state = env.reset(seed=seed)[0]["agent_pos"]
    while not done:
        action = expert(env, state)
        row = {"observation.state": state, "observation.environment_state": state, "action": action}
        seen, _, done, _, _ = env.step(action)
        rows.append(row | {"next.success": np.array([done])})
        state = seen["agent_pos"]
    columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return Episode([env.task_description] * len(rows), columns)


if __name__ == "__main__":
    from genrl.vla.data.lerobot_dataset import write_dataset

    write_dataset(Path(sys.argv[1]), (record(("red", "car")[n % 2], n) for n in range(40)), fps=10)
