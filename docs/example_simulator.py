"""A simulator of your own: any gymnasium environment with vectors as actions.

environment: {name: docs/example_simulator.py:make, tasks: [red, blue], max_steps: 30, image_size: 32}
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

CORNERS = {"red": (0.8, 0.8), "blue": (-0.8, 0.8)}


class Corner(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """A point that is to go to the corner of a colour; actions are moves of up to 0.2."""

    def __init__(self, task: str) -> None:
        self.task_description = f"go to the {task} corner"
        self.goal, self.place = np.array(CORNERS[task]), np.zeros(2)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Dict({"agent_pos": spaces.Box(-1.0, 1.0, (2,), np.float64)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Everything that is random comes from the seed: that makes runs reproducible."""
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-0.5, 0.5, 2)
        return {"agent_pos": self.place}, {}

    def step(self, action: np.ndarray):
        """One action; info says whether the task is done."""
        self.place = np.clip(self.place + 0.2 * action, -1.0, 1.0)
        success = bool(np.linalg.norm(self.place - self.goal) < 0.2)
        return {"agent_pos": self.place}, float(success), success, False, {"is_success": success}

    def picture(self, size: int) -> np.ndarray:
        """Called once per chunk, if pictures are wanted. Without it, `render()` is."""
        canvas = np.full((size, size, 3), 230, dtype=np.uint8)
        discs = {(200, 40, 40): CORNERS["red"], (40, 60, 200): CORNERS["blue"], (0, 0, 0): self.place}
        for colour, (x, y) in discs.items():
            row, column = int((1 - y) / 2 * (size - 1)), int((x + 1) / 2 * (size - 1))
            canvas[max(row - 2, 0) : row + 3, max(column - 2, 0) : column + 3] = colour
        return canvas


def make(task: str) -> Corner:
    """Called once per slot and task, in the process that has the slot."""
    return Corner(task)
