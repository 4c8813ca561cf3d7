"""Open-loop execution of action chunks on one environment: what vector environments of other simulators are made of."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


class ChunkedEnv(gymnasium.Wrapper[Any, NDArray[Any], Any, NDArray[Any]]):
    """An environment whose action is a chunk [C, D] of its own actions [D], executed until the episode ends.

    A step returns the observation after the last executed action (the final one, where the episode ended), the sum of
    the rewards, and in info: "rewards" float32 [C] (0 where nothing was executed), "n_executed" int, "is_success" bool;
    a reset gives the same with nothing executed. Never steps past an end. In gymnasium's vector environments, with
    their next-step auto-reset, this is the contract of `minitable.MiniTable`: one message per chunk, not per action.

    success_key: where info says that the task is done ("is_success" in LeRobot's environments, "success" in
    Meta-World's); it must be there after every action. The environment must have an action space of vectors (Box).
    """

    def __init__(self, env: gymnasium.Env[Any, NDArray[Any]], chunk: int, *, success_key: str = "is_success") -> None:
        super().__init__(env)
        own = env.action_space
        if not isinstance(own, spaces.Box) or len(own.shape) != 1:
            raise ValueError(f"chunks need an action space of vectors, a Box of shape [D]; {env} has {own}")
        if chunk < 1:
            raise ValueError(f"a chunk has at least one action, got {chunk}")
        self.chunk, self.success_key = chunk, success_key
        low, high = (np.repeat(bound[None], chunk, 0) for bound in (own.low, own.high))
        self.action_space = spaces.Box(low, high, dtype=own.dtype.type)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, info | self._executed(np.zeros(self.chunk, dtype=np.float32), 0, False)

    def step(self, action: NDArray[Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute a chunk [C, D]. Raises ValueError for another shape or numbers that are not finite."""
        if action.shape != self.action_space.shape or not np.isfinite(action).all():
            raise ValueError(
                f"an action of {self.env} must be {list(self.action_space.shape or ())} finite numbers; got "
                f"{list(action.shape)}, {int((~np.isfinite(action)).sum())} of them not finite"
            )
        rewards, succeeded = np.zeros(self.chunk, dtype=np.float32), False
        for k in range(self.chunk):
            observation, reward, terminated, truncated, info = self.env.step(action[k])
            if self.success_key not in info:
                raise KeyError(
                    f"{self.env} has no {self.success_key!r} in its info, only {sorted(info)}: set success_key"
                )
            rewards[k] = reward
            succeeded = succeeded or bool(info[self.success_key])
            if terminated or truncated:
                break
        total = float(rewards.sum())
        return observation, total, terminated, truncated, info | self._executed(rewards, k + 1, succeeded)

    def _executed(self, rewards: NDArray[Any], count: int, succeeded: bool) -> dict[str, Any]:
        return {"rewards": rewards, "n_executed": count, "is_success": succeeded}
