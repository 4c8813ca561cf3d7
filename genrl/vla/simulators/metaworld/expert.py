"""Demonstrations by Meta-World's scripted policies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from genrl.vla.data.frames import Shown
from genrl.vla.simulators.metaworld.env import MetaWorldEnv
from genrl.vla.simulators.metaworld.tasks import INSTRUCTIONS, MAX_STEPS, checked
from genrl.vla.simulators.scripted import Act, expert_episodes


def demonstrate(
    tasks: Sequence[str], count: int, *, seed: int, max_steps: int | None, image_size: int, points: int
) -> Shown:
    """`count` episodes of every task (all fifty where there are none); see `expert_episodes`."""
    names, limit = checked(tasks), MAX_STEPS if max_steps is None else max_steps
    how = {"seed": seed, "max_steps": limit, "image_size": image_size, "points": points}
    episodes = expert_episodes(names, MetaWorldEnv, scripted, count, **how)
    return Shown([INSTRUCTIONS[name] for name in names], episodes, rest)


def rest(actions: NDArray[np.float32]) -> Sequence[float]:
    """After its success the hand rests, with the gripper as it was."""
    return (0.0, 0.0, 0.0, float(actions[-1, 3]))


def scripted(env: MetaWorldEnv) -> Act:
    """Meta-World's policy for the task."""
    return lambda seen: env.expert_action(seen["environment_state"])
