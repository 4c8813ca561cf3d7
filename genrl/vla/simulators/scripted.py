"""Demonstrations by a script: the successful episodes of an environment's expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from genrl.vla.data.lerobot_dataset import Episode
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, POINTS, STATE
from genrl.vla.simulators.contract import episode_keys

Act = Callable[[dict[str, NDArray[np.float64]]], NDArray[Any]]
"""The expert's action from what is observed; it is clipped to [-1, 1]."""


class Demonstrated(Protocol):
    """An environment of LeRobot's names, with actions in [-1, 1], and info["success"]."""

    task_description: str

    def reset(self, *, seed: int | None = None) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]: ...

    def step(
        self, action: NDArray[np.float32], /
    ) -> tuple[dict[str, NDArray[np.float64]], float, bool, bool, dict[str, Any]]: ...

    def picture(self, size: int) -> NDArray[np.uint8]: ...

    def points(self, count: int) -> NDArray[np.float32]: ...


def expert_episodes(
    tasks: Sequence[str],
    make: Callable[[str], Demonstrated],
    expert: Callable[[Any], Act],
    count: int,
    *,
    seed: int,
    max_steps: int,
    image_size: int = 0,
    points: int = 0,
) -> Iterator[Episode]:
    """`count` successful episodes of every task, with LeRobot's columns; `expert` makes one for an environment.

    `STATE` and `ENVIRONMENT` [T, ...], `ACTION` [T, A] in [-1, 1], `IMAGE` uint8 [T, S, S, 3] and `POINTS`
    [T, N, 3] where image_size and points are not 0, "next.reward" (1 at success), "next.done", "next.success" [T, 1].
    An episode ends with its success; those that are not over in max_steps are left out, and others taken. A function of
    the seed, and of no rollout's starts.
    Raises RuntimeError where fewer than one attempt in five succeeds.
    """
    for task in tasks:
        env, found, attempt = make(task), 0, 0
        while found < count:
            if attempt >= 5 * count + 5:
                raise RuntimeError(
                    f"the expert of {task} succeeded in {found} of {attempt} episodes of at most {max_steps} steps: "
                    "allow more steps"
                )
            key = episode_keys(seed, np.array([0xE]), np.array([attempt]))[0]
            episode = _episode(env, expert(env), int(key >> np.uint64(33)), max_steps, image_size, points)
            attempt += 1
            if episode is not None:
                found += 1
                yield episode


def _episode(env: Demonstrated, act: Act, seed: int, max_steps: int, image_size: int, points: int) -> Episode | None:
    """One episode of the expert, or None where it does not succeed."""
    observation, _ = env.reset(seed=seed)
    states, surroundings, actions, pictures, clouds = [], [], [], [], []
    for _ in range(max_steps):
        states.append(observation["agent_pos"].astype(np.float32))
        surroundings.append(observation["environment_state"].astype(np.float32))
        if image_size:
            pictures.append(env.picture(image_size))
        if points:
            clouds.append(env.points(points))
        actions.append(np.clip(act(observation), -1.0, 1.0).astype(np.float32))
        observation, _, _, _, info = env.step(actions[-1])
        if info["success"]:
            break
    else:
        return None
    last = (np.arange(len(actions)) == len(actions) - 1)[:, None]
    columns: dict[str, NDArray[Any]] = {
        STATE: np.stack(states),
        ENVIRONMENT: np.stack(surroundings),
        ACTION: np.stack(actions),
        "next.reward": last.astype(np.float32),
        "next.done": last,
        "next.success": last,
    }
    looked = {name: np.stack(shown) for name, shown in ((IMAGE, pictures), (POINTS, clouds)) if shown}
    return Episode([env.task_description] * len(actions), columns | looked)
