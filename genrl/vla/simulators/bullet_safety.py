"""bullet-safety-gym's environments (MIT licence, states and costs) as functions of their seeds.

As released, a seeded reset does not repeat a start, for two reasons: everything random comes from the global generators
of numpy and `random`, whatever the seed; and a reset restores a saved world of PyBullet's, which does not hold the
targets of motors, so that cars and drones begin with the last action of the episode before. So an episode has a world
of its own here, built with the seed's numbers, and these generators are as they were between its actions.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

PACKAGE = "bullet_safety_gym"


class BulletSafetyEnv(gymnasium.Env[NDArray[np.float64], NDArray[np.float32]]):
    """An environment of the package: a vector of numbers, actions in [-1, 1], info["cost"] 0 or 1 of every action."""

    def __init__(self, spec: EnvSpec, settings: Mapping[str, Any]) -> None:
        self.name = spec.id
        with _real_streams():
            self.make = load_env_creator(str(spec.entry_point))
        self.settings = {**spec.kwargs, **settings}
        self.draws = np.random.MT19937(0)
        self.inner: Any = self._built()[0]
        self.action_space, self.observation_space = self.inner.action_space, self.inner.observation_space

    def __str__(self) -> str:
        return self.name

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """A new world by the numbers of the seed, or without one by the next numbers."""
        self.draws = np.random.MT19937(self.draws.random_raw() if seed is None else seed)
        self.inner.close()
        self.inner, first = self._built()
        return first

    def step(self, action: NDArray[np.float32]) -> Any:
        """Resets as the package does; goals that move are drawn by the numbers of the episode, too."""
        with self._own_draws():
            return self.inner.step(action)

    def picture(self, size: int) -> NDArray[np.uint8]:
        """The middle of the package's picture, a square that was drawn without a display, uint8."""
        pixels = np.asarray(self.inner.render(mode="rgb_array")).astype(np.uint8)
        left = (pixels.shape[1] - len(pixels)) // 2
        return pixels[:, left : left + len(pixels)]

    def close(self) -> None:
        """End the simulation."""
        self.inner.close()

    def _built(self) -> tuple[Any, Any]:
        """A world, and what its reset returns. Obstacles are turned by `random`, which nothing else here uses."""
        outside = random.getstate()
        random.seed(int(self.draws.random_raw()))
        try:
            with _real_streams(), self._own_draws():
                inner: Any = self.make(**self.settings)
                return inner, inner.reset()
        finally:
            random.setstate(outside)

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """numpy's global generator is this episode's, as long as it lasts."""
        outside = np.random.get_bit_generator()  # type: ignore[attr-defined]
        np.random.set_bit_generator(self.draws)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            np.random.set_bit_generator(outside)  # type: ignore[attr-defined]


def environment(spec: EnvSpec, max_steps: int | None, settings: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """The environment of an id, with its own time limit or another."""
    limit = spec.max_episode_steps if max_steps is None else max_steps
    assert limit is not None  # the package gives one to all of its ids
    return TimeLimit(BulletSafetyEnv(spec, settings), limit)


@contextmanager
def _real_streams() -> Iterator[None]:
    """The package silences the process's own streams by their names, and fails where others stand for them."""
    with redirect_stdout(sys.__stdout__), redirect_stderr(sys.__stderr__):
        yield
