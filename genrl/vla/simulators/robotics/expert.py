"""Demonstrations of Fetch, PointMaze and Reacher by their scripted experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from genrl.vla.data.frames import Shown
from genrl.vla.simulators.robotics.env import RoboticsEnv, checked
from genrl.vla.simulators.robotics.fetch import FetchEnv
from genrl.vla.simulators.robotics.point_maze import PointMazeEnv
from genrl.vla.simulators.robotics.reacher import ReacherEnv
from genrl.vla.simulators.scripted import expert_episodes


def fetch(tasks: Sequence[str], count: int, *, seed: int, max_steps: int | None, image_size: int, points: int) -> Shown:
    """`count` episodes of every task (all where there are none); see `expert_episodes`."""
    return _shown(FetchEnv, checked(FetchEnv, "fetch", tasks), count, seed, max_steps, image_size, points)


def point_maze(
    tasks: Sequence[str], count: int, *, seed: int, max_steps: int | None, image_size: int, points: int
) -> Shown:
    """`count` episodes of every maze (all where there are none); see `expert_episodes`."""
    return _shown(PointMazeEnv, checked(PointMazeEnv, "point_maze", tasks), count, seed, max_steps, image_size, points)


def reacher(
    tasks: Sequence[str], count: int, *, seed: int, max_steps: int | None, image_size: int, points: int
) -> Shown:
    """`count` episodes; see `expert_episodes`."""
    return _shown(ReacherEnv, checked(ReacherEnv, "reacher", tasks), count, seed, max_steps, image_size, points)


def rest(actions: NDArray[np.float32]) -> Sequence[float]:
    """After its success a robot is pushed no further."""
    return [0.0] * int(actions.shape[1])


def _shown(
    family: type[RoboticsEnv],
    names: Sequence[str],
    count: int,
    seed: int,
    max_steps: int | None,
    image_size: int,
    points: int,
) -> Shown:
    limit = max(family.tasks[name].max_steps for name in names) if max_steps is None else max_steps
    how = {"seed": seed, "max_steps": limit, "image_size": image_size, "points": points}
    episodes = expert_episodes(names, family, lambda env: env.expert, count, **how)
    return Shown([family.tasks[name].instruction for name in names], episodes, rest)
