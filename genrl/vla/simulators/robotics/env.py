"""What Fetch, PointMaze and Reacher share: a task's model once per process, pictures, and one interface.

Each slot has a state (`MjData`) of its own in the model of its task. What an episode writes into the model is the place
of the red target, which is only drawn, and from the slot's own goal; so slots do not see each other, and an episode is
a function of its seed.
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from genrl.vla.simulators.contract import Description, Reading
from genrl.vla.simulators.mujoco_scenes import DEPTH_SIZE, Box, cloud, import_mujoco, renderer
from genrl.vla.simulators.simulator import SlotHost, find_registered

if TYPE_CHECKING:
    from genrl.vla.data.frames import Shown

Seen = dict[str, NDArray[np.float64]]

FIELD_OF_VIEW = np.pi / 4
"""Of MuJoCo's free camera."""


class Task(NamedTuple):
    """Its gymnasium id, the longest episode in actions, and its instruction."""

    id: str
    max_steps: int
    instruction: str


class View(NamedTuple):
    """A camera: the point that it looks at, how far from it, and from where, in metres and degrees."""

    at: tuple[float, float, float]
    distance: float
    azimuth: float
    elevation: float


class RoboticsEnv(gymnasium.Env[Seen, NDArray[np.float32]]):
    """One task with random starts and goals, by the seed of the reset.

    Observations: "agent_pos", what the robot knows of itself, and "environment_state", the rest that its task needs;
    in pictures the target is a red ball. Success is info["success"]; the reward is the simulator's own.
    """

    name: ClassVar[str]
    """What the family is called in a configuration."""
    tasks: ClassVar[Mapping[str, Task]]
    """Of the family, by name."""
    sizes: ClassVar[tuple[int, int]]
    """Numbers of "agent_pos" and "environment_state"."""
    workspace: ClassVar[Box]
    """Of clouds, without what lies under everything."""

    def __init__(self, task: str) -> None:
        self.task, self.task_description = task, self.tasks[task].instruction
        self.shared = loaded(self.tasks[task].id)
        self.inner = self.slot()
        self.action_space = self.shared.made.action_space
        boxes = {
            name: spaces.Box(-np.inf, np.inf, (size,), np.float64)
            for name, size in zip(("agent_pos", "environment_state"), self.sizes, strict=True)
        }
        self.observation_space = spaces.Dict(boxes)  # type: ignore[arg-type, assignment]

    @abstractmethod
    def slot(self) -> Any:
        """The simulator's environment with a state of its own (`twin`)."""

    @abstractmethod
    def ahead(self) -> Any:
        """`inner` with a copy of its state: what is tried there does not happen here."""

    @abstractmethod
    def named(self, raw: Any) -> Seen:
        """The simulator's observation by the contract's names."""

    @abstractmethod
    def succeeded(self, info: Mapping[str, Any]) -> bool:
        """Whether an action ended at the target, by what the simulator says of it."""

    def mark(self) -> None:
        """Put the target of the pictures to the goal, where the state does not do so."""

    @abstractmethod
    def view(self) -> View:
        """The camera of the pictures."""

    @abstractmethod
    def expert(self, seen: Seen) -> NDArray[np.float64]:
        """The scripted action from here; whoever asks clips it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Seen, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        raw, _ = self.inner.reset(seed=seed)
        self.seen = self.named(raw)
        return self.seen, {"success": False}

    def step(self, action: NDArray[np.float32]) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        """One action."""
        raw, reward, terminated, truncated, info = self.inner.step(action.astype(np.float64))
        self.seen = self.named(raw)
        return self.seen, float(reward), bool(terminated), bool(truncated), {"success": self.succeeded(info)}

    def expert_chunk(self, horizon: int) -> NDArray[np.float32]:
        """See `simulator.Expert`: `expert`'s next actions, which keep to the target once it is reached."""
        inner, observation, actions = self.ahead(), self.seen, []
        for _ in range(horizon):
            actions.append(np.clip(self.expert(observation), -1.0, 1.0).astype(np.float32))
            observation = self.named(inner.step(actions[-1].astype(np.float64))[0])
        return np.stack(actions)

    def picture(self, size: int) -> NDArray[np.uint8]:
        """What the camera sees, uint8 [size, size, 3]."""
        return np.ascontiguousarray(self.filmed(size).render())

    def points(self, count: int) -> NDArray[np.float32]:
        """What the camera sees in the workspace, the target too, in the world's frame, [count, 3]."""
        return cloud(self.shared.mujoco, self.filmed(DEPTH_SIZE), count, self.workspace)

    def filmed(self, size: int) -> Any:
        """The renderer of this size, with the scene before its camera and the target at its goal."""
        self.mark()
        return self.shared.seen(self.inner.data, self.view(), size)

    def close(self) -> None:
        """Nothing: the model is the process's."""


class Shared:
    """A task's environment as gymnasium makes it, never stepped, and its renderers, one per size."""

    def __init__(self, task_id: str) -> None:
        self.mujoco = import_mujoco(task_id, "robotics")
        robotics_env: Any = gymnasium.make(find_registered(task_id), disable_env_checker=True)
        self.made = robotics_env.unwrapped
        model, plane = self.made.model, self.mujoco.mjtGeom.mjGEOM_PLANE
        for number in np.flatnonzero(model.geom_type == int(plane)):
            # a floor is drawn in squares of this size, 0.25 m in PointMaze: two thirds of a picture's time for nothing
            model.geom_size[number, 2] = model.geom_size[number, :2].max()
        self.renderers: dict[int, Any] = {}

    def seen(self, data: Any, view: View, size: int) -> Any:
        """The renderer of this size, with the scene as it is in `data` before its camera."""
        if size not in self.renderers:
            self.renderers[size] = renderer(self.mujoco, self.made.model, size)
        camera = self.mujoco.MjvCamera()
        camera.lookat[:], camera.distance = view.at, view.distance
        camera.azimuth, camera.elevation = view.azimuth, view.elevation
        self.renderers[size].update_scene(data, camera)
        return self.renderers[size]


@cache
def loaded(task_id: str) -> Shared:
    """The environment of this process. Raises Misuse where gymnasium-robotics is not installed."""
    return Shared(task_id)


def twin(made: Any, **own: Any) -> Any:
    """Another environment with the same model, and what is its own; copy.copy would load the model again."""
    other = object.__new__(type(made))
    vars(other).update(vars(made) | own)
    return other


def describe(
    family: type[RoboticsEnv], tasks: Sequence[str], reading: Reading, settings: Mapping[str, Any]
) -> Description:
    """Describes these tasks of a family, all where there are none."""
    if settings:
        raise ValueError(f"{family.name} has no settings, got {sorted(settings)}")
    names = checked(family, tasks)
    limits = [family.tasks[task].max_steps for task in names]
    limit = max(limits) if reading.max_steps is None else reading.max_steps
    arguments = {"family": family, "tasks": names, "reading": replace(reading, success_key="success", max_steps=limit)}
    return Description(host, arguments, len(names), limit)


def host(slots: int, *, family: type[RoboticsEnv], tasks: Sequence[str], reading: Reading) -> SlotHost:
    """Slots of these tasks."""
    return SlotHost(lambda task: family(tasks[task]), len(tasks), reading)


def demonstrate(
    family: type[RoboticsEnv], tasks: Sequence[str], count: int, *, max_steps: int | None, **how: Any
) -> Shown:
    """`count` episodes of every task by the family's scripted expert, of all tasks where there are none.

    how: seed, image_size and points, of `demonstrations.expert_episodes`.
    """
    from genrl.vla.data.demonstrations import expert_episodes
    from genrl.vla.data.frames import Shown

    names = checked(family, tasks)
    limit = max(family.tasks[name].max_steps for name in names) if max_steps is None else max_steps
    episodes = expert_episodes(names, family, lambda env: env.expert, count, max_steps=limit, **how)
    # after its success a robot is pushed no further
    return Shown([family.tasks[name].instruction for name in names], episodes, lambda actions: [0.0] * actions.shape[1])


def checked(family: type[RoboticsEnv], tasks: Sequence[str]) -> tuple[str, ...]:
    """Names of tasks, all where there are none. Raises ValueError for one that is none."""
    for task in tasks:
        if task not in family.tasks:
            near = difflib.get_close_matches(task.lower(), family.tasks, n=1, cutoff=0.0)[0]
            names = ", ".join(family.tasks)
            raise ValueError(
                f"environment.tasks: {family.name} has no task {task!r}; the nearest is {near!r}, of {names}"
            )
    return tuple(tasks) or tuple(family.tasks)
