"""Environments for workers, and how to make them fail: an action says so; and one with costs."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

FINE, RAISE, KILL, HANG = 0.0, 0.2, 0.4, 0.6


class Frail(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """A walk from a start that the seed decides to +1, 6 steps long at most. The second number of an action is one of
    the above."""

    def __init__(self, task: str = "", picture: int = 0) -> None:
        self.observation_space = spaces.Dict({"agent_pos": spaces.Box(-9.0, 9.0, (3,), np.float64)})
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.task_description = f"walk {task}".strip()
        self.position, self.time, self.size = 0.0, 0, picture

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.position, self.time = float(self.np_random.uniform(-1.0, 0.0)), 0
        return self.shown(), {}

    def step(self, action: np.ndarray):
        mode = round(float(action[1]), 1)
        if mode == RAISE:
            raise RuntimeError("the gripper fell off")
        if mode == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == HANG:
            time.sleep(3600.0)
        self.position += float(action[0])
        self.time += 1
        success = self.position >= 1.0
        return self.shown(), 0.25, False, self.time >= 6, {"is_success": success}

    def shown(self) -> dict[str, np.ndarray]:
        noise = float(self.np_random.normal())
        return {"agent_pos": np.array([self.position, self.time, noise])}

    def picture(self, size: int) -> np.ndarray:
        return np.full((size, size, 3), 40 * self.time, dtype=np.uint8)


def make(task: str = "") -> Frail:
    return Frail(task)


class Picky(Frail):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        if seed is not None and seed % 3 == 0:
            raise RuntimeError(f"no grasp for seed {seed}")
        return super().reset(seed=seed, options=options)


class Old(Frail):
    """Four values, as gym had them."""

    def step(self, action: np.ndarray):
        seen, reward, _, late, info = super().step(action)
        return seen, reward, late, info


def broken_start() -> Frail:
    raise OSError("no such robot")


def slow_start() -> Frail:
    time.sleep(3600.0)
    return Frail()


def dies_at_start_once(flag: str) -> Frail:
    if not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Frail()


class Line(gymnasium.Env[np.ndarray, np.ndarray]):
    """Actions are moves of up to 1, each pays its move; it ends at 3, and beyond 1 an action costs what the place is.

    Observations [2]: the place, and how far the end is.
    """

    observation_space = spaces.Box(-20.0, 20.0, (2,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place = 0.0
        return self.seen(), {}

    def seen(self) -> np.ndarray:
        return np.array([self.place, 3.0 - self.place])

    def step(self, action: np.ndarray) -> Any:
        self.place += float(action[0])
        cost = self.place if self.place > 1 else 0.0
        return self.seen(), float(action[0]), self.place >= 3, False, {"cost": cost}
