"""A simulator of your own: any gymnasium environment with vectors as actions.

environment: {name: docs/example_simulator.py:make, tasks: [red, blue], max_steps: 30}

`python docs/example_simulator.py FOLDER` writes demonstrations of it.
"""

import sys
from pathlib import Path
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

    def expert_chunk(self, horizon: int) -> np.ndarray:
        """What an expert would do from here, [horizon, 2], for DAgger. Nothing moves. Leave it out if there is none."""
        place, actions = self.place, []
        for _ in range(horizon):
            actions.append(np.clip((self.goal - place) / 0.2, -1.0, 1.0).astype(np.float32))
            place = place + 0.2 * actions[-1]
        return np.stack(actions)

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


def record(task: str, seed: int):
    """A demonstration: row t holds what was seen before action t, the action, and what came of it."""
    from genrl.vla.data.lerobot_dataset import Episode

    env, rows, done = make(task), [], False
    seen, _ = env.reset(seed=seed)
    while not done:
        action = env.expert_chunk(1)[0]
        row = {"observation.state": seen["agent_pos"].astype(np.float32), "observation.image": env.picture(32)}
        seen, _, done, _, _ = env.step(action)
        rows.append(row | {"action": action, "next.success": np.array([done])})
    columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return Episode([env.task_description] * len(rows), columns)


if __name__ == "__main__":
    from genrl.vla.data.lerobot_dataset import write_dataset

    write_dataset(Path(sys.argv[1]), (record(("red", "blue")[n % 2], n) for n in range(40)), fps=10)
