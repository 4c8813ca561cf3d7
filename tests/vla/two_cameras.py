"""An environment with a camera above the table and one at the hand, which its observation shows, or which it draws."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

COLOURS = {"top": 40, "wrist": 200}


class Shows(gymnasium.Env[dict[str, Any], np.ndarray]):
    """The pictures of both are one grey each, and black in the corner; five numbers of state, three of an action."""

    task_description = "walk on"

    def __init__(self) -> None:
        self.observation_space = spaces.Dict({"agent_pos": spaces.Box(-9.0, 9.0, (5,), np.float64)})
        self.action_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.place = np.zeros(5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1.0, 1.0, 5)
        return self.shown(), {}

    def step(self, action: np.ndarray):
        self.place[:3] += 0.1 * action
        return self.shown(), 0.0, False, False, {"is_success": bool(self.place[0] > 5.0)}

    def shown(self) -> dict[str, Any]:
        return {"agent_pos": self.place.copy(), "pixels": {name: grey(name, 48) for name in COLOURS}}


class Draws(Shows):
    cameras = tuple(COLOURS)

    def shown(self) -> dict[str, Any]:
        return {"agent_pos": self.place.copy()}

    def picture(self, size: int, camera: str = "top") -> np.ndarray:
        return grey(camera, size)


def grey(camera: str, size: int) -> np.ndarray:
    picture = np.full((size, size, 3), COLOURS[camera], dtype=np.uint8)
    picture[: size // 4, : size // 4] = 0
    return picture
