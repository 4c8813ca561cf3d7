"""A gymnasium environment with rewards and costs, and none of success: a place on a line."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


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
