"""Demonstrations by Meta-World's scripted policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.vla.data.lerobot_dataset import Episode
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE
from genrl.vla.simulators.metaworld.env import MetaWorldEnv
from genrl.vla.simulators.metaworld.tasks import MAX_STEPS, checked
from genrl.vla.simulators.minitable.task import episode_keys

NAMES = {ACTION: ["dx", "dy", "dz", "grip"], STATE: ["x", "y", "z", "open"]}
"""Of the columns, for `write_dataset`."""
FPS = 80


def expert_episodes(
    tasks: Sequence[str], count: int, *, seed: int, max_steps: int = MAX_STEPS, image_size: int = 0
) -> Iterator[Episode]:
    """`count` successful episodes of every task (all fifty where there are none), with LeRobot's columns.

    `STATE` [T, 4], `ENVIRONMENT` [T, 39], `ACTION` [T, 4] in [-1, 1], `IMAGE` uint8 [T, S, S, 3] unless image_size is
    0, "next.reward" (1 at success), "next.done", "next.success" [T, 1]. An episode ends with its success; those that
    are not over in max_steps are left out, and others taken. A function of the seed, and of no rollout's starts.
    Raises RuntimeError where fewer than one attempt in five succeeds.
    """
    for task in checked(tasks):
        env, found, attempt = MetaWorldEnv(task), 0, 0
        while found < count:
            if attempt >= 5 * count + 5:
                raise RuntimeError(
                    f"the expert of {task} succeeded in {found} of {attempt} episodes of at most {max_steps} steps: "
                    "allow more steps"
                )
            episode = _episode(env, seed, attempt, max_steps, image_size)
            attempt += 1
            if episode is not None:
                found += 1
                yield episode


def rest(actions: NDArray[np.float32]) -> Sequence[float]:
    """After its success the hand rests, with the gripper as it was."""
    return (0.0, 0.0, 0.0, float(actions[-1, 3]))


def _episode(env: MetaWorldEnv, seed: int, attempt: int, max_steps: int, image_size: int) -> Episode | None:
    """One episode of the expert, or None where it does not succeed."""
    key = episode_keys(seed, np.array([0xE]), np.array([attempt]))[0]
    observation, _ = env.reset(seed=int(key >> np.uint64(33)))
    seen, actions, pictures = [], [], []
    for _ in range(max_steps):
        seen.append(observation["environment_state"].astype(np.float32))
        if image_size:
            pictures.append(env.picture(image_size))
        actions.append(env.expert_action(observation["environment_state"]))
        observation, _, _, _, info = env.step(actions[-1])
        if info["success"]:
            break
    else:
        return None
    last = (np.arange(len(actions)) == len(actions) - 1)[:, None]
    state = np.stack(seen)
    columns: dict[str, NDArray[Any]] = {
        STATE: state[:, :4],
        ENVIRONMENT: state,
        ACTION: np.stack(actions),
        "next.reward": last.astype(np.float32),
        "next.done": last,
        "next.success": last,
    }
    return Episode([env.task_description] * len(actions), columns | ({IMAGE: np.stack(pictures)} if image_size else {}))
