"""Every simulator by one function, as what a rollout steps: vectorised tables whose action is a chunk."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from genrl.mdp.noise import derive_seed
from genrl.vla.rollout.rollout import Tables
from genrl.vla.simulators import libero, maniskill, ray_workers
from genrl.vla.simulators.metaworld import tasks as metaworld
from genrl.vla.simulators.minitable import INSTRUCTIONS, PUT, TOUCH
from genrl.vla.simulators.minitable.task import MAX_STEPS
from genrl.vla.simulators.simulator import Description, Reading, find_registered, is_function
from genrl.vla.simulators.workers import Inline, Process, Simulators

BUILT_IN = ("minitable", "metaworld", "maniskill", "libero")


class Environment(Tables, Protocol):
    """`rollout.Tables` that can be looked at, counted and closed.

    max_steps: actions until an episode is truncated; None where only the environment itself knows.
    action_dim: D of the chunks [B, C, D] (known after the first reset). waited_s: seconds spent on simulators so far.
    dropped: episodes lost to simulators that died, hung or raised. restarts: workers that had to be started again.
    info["dropped"] bool [B]: the episode was lost in this decision; such a row is truncated, executed nothing, and
    shows the last observation again. The next decision begins another episode, as after every end.

    `reset(options={"episodes": uint64 [B]})` begins chosen episodes (`evaluation_episodes`) instead of those of a seed.
    """

    max_steps: int | None
    waited_s: float
    dropped: int
    restarts: int

    @property
    def action_dim(self) -> int: ...

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]: ...

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """Pictures of some slots as they are now, [n, render_size, render_size, 3]."""
        ...

    def close(self) -> None: ...


def open_environment(
    name: str,
    *,
    num_envs: int,
    chunk: int,
    tasks: Sequence[str] = (),
    group_size: int = 1,
    workers: int | Literal["ray"] = 0,
    ray_actors: int = 0,
    timeout_s: float = 60.0,
    start_timeout_s: float = 120.0,
    image_size: int = 0,
    cameras: Sequence[str] = (),
    render_size: int = 128,
    max_steps: int | None = None,
    reward: Literal["success", "environment"] = "success",
    goals: int = 0,
    seed: int = 0,
    instruction: str = "",
    success_key: str = "is_success",
    proprioception: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Environment:
    """`num_envs` slots of a simulator, executing chunks of `chunk` actions; nothing is started before the first reset.

    name: "minitable", "metaworld", "maniskill", "libero", a gymnasium id ("gym_pusht/PushT-v0"), or a function
    "file.py:function" that returns a gymnasium environment. tasks: instructions (or "put", "touch") of MiniTable, names
    of Meta-World, of LIBERO ("libero_spatial", "libero_10/3"), ids of ManiSkill, or what the function is to be called
    with as `task`; where empty: put, all fifty, libero_spatial, PickCube-v1. group_size: consecutive slots that see the
    same episodes. workers: processes, 0 for this one, or "ray" with `ray_actors` actors (0: one per CPU of the
    cluster). timeout_s: the longest one environment may take for a chunk, start_timeout_s for beginning an episode, for
    which it may have to be made. image_size: pixels of a square picture, 0 for none. cameras: those whose pictures are
    shown, each as "pixels/<camera>"; where there are none, one as "pixels". max_steps: actions until truncation (None:
    the simulator's own limit). reward: 1 at success, or the environment's. goals, seed: number of
    fixed starts of each task, drawn by the seed; 0 for a new one per episode. instruction, success_key, proprioception,
    settings are for gymnasium environments: the sentence (if the environment has no `task_description`), the entry of
    info that says success, how many of the first numbers of the observation are `agent_pos`, and keyword arguments of
    `gymnasium.make` or of the function; settings also of ManiSkill's make, and of `libero.host`.
    Raises ValueError for what does not fit together.
    """
    described, count, limit = _described(
        name,
        tuple(tasks),
        Reading(
            chunk, instruction, success_key, reward, max_steps, image_size, tuple(cameras), proprioception, goals, seed
        ),
        dict(settings or {}),
    )
    if workers == "ray":
        kind: Any = ray_workers.Actor
        number = ray_workers.actors(ray_actors)
    else:
        kind, number = (Process, workers) if workers else (Inline, 1)
    return Simulators(
        described,
        kind,
        workers=number,
        num_envs=num_envs,
        chunk=chunk,
        group_size=group_size,
        tasks=count,
        max_steps=limit,
        render_size=render_size,
        timeout_s=timeout_s,
        start_timeout_s=start_timeout_s,
    )


def _described(
    name: str, tasks: tuple[str, ...], how: Reading, settings: dict[str, Any]
) -> tuple[Description, int, int | None]:
    """What workers host, the number of tasks, the time limit if it is known."""
    if name in ("minitable", "metaworld", "maniskill") and how.cameras:
        raise ValueError(
            f"{name} has one camera, observation.image; the policy reads {list(how.cameras)}: write policy.rename "
            f"{{observation.image: observation.images.{how.cameras[0]}}}, which leaves others empty"
        )
    if name in ("minitable", "metaworld") and settings:
        raise ValueError(f"{name} has no settings, got {sorted(settings)}")
    if name == "minitable" and (how.goals or how.instruction or how.proprioception):
        raise ValueError("goals, instruction and proprioception are not for minitable, which has its own")
    if name == "minitable":
        limit = MAX_STEPS if how.max_steps is None else how.max_steps
        told = {"tasks": minitable_tasks(tasks), "chunk": how.chunk, "image_size": how.image_size, "max_steps": limit}
        return (
            Description("genrl.vla.simulators.minitable.host:host", told),
            1,
            limit,
        )  # a table draws its task by itself
    if name == "metaworld":
        limit = metaworld.MAX_STEPS if how.max_steps is None else how.max_steps
        names = metaworld.checked(tasks)
        told = {"tasks": names, "reading": replace(how, success_key="success", max_steps=limit)}
        return Description("genrl.vla.simulators.metaworld.env:host", told), len(names), limit
    if name == "libero":
        names = libero.expanded(tasks)
        limit = libero.time_limit(names) if how.max_steps is None else how.max_steps
        told = {"tasks": names, "reading": replace(how, max_steps=limit)} | settings
        return Description("genrl.vla.simulators.libero:host", told), len(names), limit
    if name == "maniskill":
        names = tasks or ("PickCube-v1",)
        limit = maniskill.MAX_STEPS if how.max_steps is None else how.max_steps
        told = {"tasks": names, "reading": replace(how, success_key="success", max_steps=limit), "settings": settings}
        return Description("genrl.vla.simulators.maniskill:host", told), len(names), limit
    if is_function(name):
        known = how.max_steps
    elif "/" in name or "-v" in name:
        known = find_registered(name).max_episode_steps if how.max_steps is None else how.max_steps
    else:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f" (the nearest is {near[0]!r})" if near else ""
        raise ValueError(f"no environment {name!r}{hint}: {list(BUILT_IN)}, a gymnasium id, or file.py:function")
    told = {"name": name, "reading": how, "settings": settings, "tasks": tasks}
    return Description("genrl.vla.simulators.simulator:gymnasium_host", told), max(1, len(tasks)), known


def evaluation_episodes(seed: int, count: int) -> NDArray[np.uint64]:
    """Numbers of `count` episodes, a function of the seed: consecutive, so that all tasks get (nearly) equally many."""
    return np.uint64(derive_seed(seed, "evaluation")) + np.arange(count, dtype=np.uint64)


def minitable_tasks(names: Sequence[str]) -> tuple[int, ...]:
    """Numbers of instructions: of "put" (9), "touch" (3) or an instruction itself; "put" where there are none."""
    numbers: list[int] = []
    for name in names or ("put",):
        if name in ("put", "touch"):
            numbers += PUT if name == "put" else TOUCH
        elif name in INSTRUCTIONS:
            numbers.append(INSTRUCTIONS.index(name))
        else:
            near = difflib.get_close_matches(name.replace("-", " "), ("put", "touch", *INSTRUCTIONS), n=1, cutoff=0.4)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(
                f"environment.tasks: MiniTable has no task {name!r}{hint}; write 'put' (nine instructions), 'touch' "
                f"(three), or instructions themselves: {', '.join(map(repr, INSTRUCTIONS))}"
            )
    return tuple(dict.fromkeys(numbers))
