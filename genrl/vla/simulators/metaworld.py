"""Meta-World (arXiv 1910.10897): fifty tasks of a robot arm, as environments that share what is large, forget
their past, and are rendered quickly.

A task's model (13 MB) is loaded once per process; its slots have states of their own, and take turns in it. A reset
begins from what the task was when it was made, so an episode is a function of its seed, whatever was run before.

The tasks have no instructions of their own: each has a sentence here.
"""

from __future__ import annotations

import copy
import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from genrl.vla.simulators.contract import Description, Misuse, Reading
from genrl.vla.simulators.mujoco_scenes import DEPTH_SIZE, Box, cloud, import_mujoco, renderer
from genrl.vla.simulators.simulator import SlotHost
from genrl_rewards.extras import install

if TYPE_CHECKING:
    from genrl.vla.data.frames import Rest, Shown

CAMERA = "corner2"
CAMERA_PLACE = (0.75, 0.075, 0.7)
"""LeRobot's: nearer to the table; its pictures are turned by 180 degrees."""
WORKSPACE = Box((-0.6, 0.3, 0.005), (0.6, 0.95, 0.6))
"""Of clouds: over the table, without its top."""
PROPRIOCEPTION = 4
"""The first numbers of the observation: the hand's position, and how far the gripper is open."""


def describe(tasks: Sequence[str], reading: Reading, settings: Mapping[str, Any]) -> Description:
    """Describes these tasks, all fifty where there are none."""
    if settings:
        raise ValueError(f"metaworld has no settings, got {sorted(settings)}")
    limit = MAX_STEPS if reading.max_steps is None else reading.max_steps
    names = checked(tasks)
    arguments = {"tasks": names, "reading": replace(reading, success_key="success", max_steps=limit)}
    return Description(host, arguments, len(names), limit)


def host(slots: int, *, tasks: Sequence[str], reading: Reading) -> SlotHost:
    """Slots of these tasks."""
    return SlotHost(lambda task: MetaWorldEnv(tasks[task]), len(tasks), reading)


def demonstrate(tasks: Sequence[str], count: int, *, max_steps: int | None, **how: Any) -> Shown:
    """`count` episodes of every task by Meta-World's scripted policies, of all fifty where there are none.

    how: seed, image_size and points, of `demonstrations.expert_episodes`.
    """
    from genrl.vla.data.demonstrations import expert_episodes
    from genrl.vla.data.frames import Shown

    names, limit = checked(tasks), MAX_STEPS if max_steps is None else max_steps
    episodes = expert_episodes(names, MetaWorldEnv, scripted, count, max_steps=limit, **how)
    # after its success the hand rests, with the gripper as it was
    still: Rest = lambda actions: (0.0, 0.0, 0.0, float(actions[-1, 3]))  # noqa: E731
    return Shown([INSTRUCTIONS[name] for name in names], episodes, still)


def scripted(env: MetaWorldEnv) -> Callable[[Mapping[str, NDArray[np.float64]]], NDArray[np.float32]]:
    """Meta-World's policy for the task."""
    return lambda seen: env.expert_action(seen["environment_state"])


class MetaWorldEnv(gymnasium.Env[dict[str, NDArray[np.float64]], NDArray[np.float32]]):
    """One task with random starts and goals, by the seed of the reset.

    Observations: "environment_state" [39] (now, a step ago, the goal) and "agent_pos" [4]. Actions [4] in [-1, 1]: a
    move of up to 1 cm along each axis, and the grip. info["success"] is 0 or 1; the reward is Meta-World's, dense.
    """

    def __init__(self, task: str) -> None:
        self.task = task
        self.task_description = INSTRUCTIONS[task]
        self.scene = _scene(task)
        self.inner: Any = None
        self.moved: dict[str, NDArray[Any]] = {}
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        parts = {"environment_state": (39,), "agent_pos": (PROPRIOCEPTION,)}
        boxes: dict[str, Any] = {name: spaces.Box(-np.inf, np.inf, size, np.float64) for name, size in parts.items()}
        self.observation_space = spaces.Dict(boxes)  # type: ignore[assignment]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.scene.enter(self, begin=True)
        inner, mujoco = self.inner, _mujoco()
        inner.np_random = self.np_random
        inner.curr_path_length = 0
        for frozen in (False, True):  # as Meta-World does: only the second one sees what the first has moved
            inner._freeze_rand_vec = frozen
            mujoco.mj_resetData(inner.model, inner.data)
            observation = inner.reset_model()
        inner._prev_obs = observation[:18].copy()
        observation[18:36] = inner._prev_obs
        mujoco.mj_forward(inner.model, inner.data)
        self.seen = observation
        return _named(observation), {"success": 0.0}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[dict[str, NDArray[np.float64]], float, bool, bool, dict[str, Any]]:
        """One action."""
        self.scene.enter(self)
        observation, reward, _, truncated, info = self.inner.step(action)
        self.seen = observation
        return _named(observation), float(reward), False, truncated, info

    def expert_action(self, seen: NDArray[np.float64]) -> NDArray[np.float32]:
        """What Meta-World's scripted policy does at an observation [39]: [4], clipped to the box."""
        from metaworld.policies import ENV_POLICY_MAP

        kind: Any = ENV_POLICY_MAP[self.task]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its actions are large: they are clipped here
            action: NDArray[np.float64] = kind().get_action(seen)
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def expert_chunk(self, horizon: int) -> NDArray[np.float32]:
        """See `simulator.Expert`: the scripted policy's next actions, tried on a copy of the state. After its success
        the hand rests, with the gripper as it was."""
        self.scene.enter(self)
        inner, before = self.inner, dict(vars(self.inner))
        vars(inner).update(copy.deepcopy({name: before[name] for name in self.scene.own}))
        inner.data, inner.curr_path_length = copy.copy(inner.data), 0
        actions = np.zeros((horizon, 4), dtype=np.float32)
        observation, success = self.seen, False
        try:
            for k in range(horizon):
                actions[k] = (0.0, 0.0, 0.0, actions[k - 1, 3]) if success else self.expert_action(observation)
                observation, _, _, _, info = inner.step(actions[k])
                success = success or bool(info["success"])
        finally:
            vars(inner).update(before)
        return actions

    def picture(self, size: int) -> NDArray[np.uint8]:
        """What the camera sees, uint8 [size, size, 3]."""
        self.scene.enter(self)
        return self.scene.picture(self.inner.data, size)

    def points(self, count: int) -> NDArray[np.float32]:
        """What the camera sees over the table, in the world's frame, [count, 3]."""
        self.scene.enter(self)
        return cloud(_mujoco(), self.scene.seen(self.inner.data, DEPTH_SIZE), count, WORKSPACE)

    def close(self) -> None:
        """Nothing: the model is the process's."""


class _Scene:
    """A task's model, which of its environments is in it, and its renderers, one per size."""

    def __init__(self, task: str) -> None:
        task_env = _task_class(task)()
        task_env._partially_observable = False  # the goal is in the observation, as in Meta-World's MT benchmarks
        del task_env.sawyer_observation_space  # whose bounds for the goal were those of a hidden one
        task_env._freeze_rand_vec, task_env.seeded_rand_vec = False, True
        task_env._set_task_called = True
        camera = _mujoco().mj_name2id(task_env.model, _mujoco().mjtObj.mjOBJ_CAMERA, CAMERA)
        task_env.model.cam_pos[camera] = CAMERA_PLACE
        self.made, self.model = task_env, task_env.model
        shared = {"model", "data", "mujoco_renderer", "np_random", "_np_random"}
        spaces_too = {name for name, value in vars(task_env).items() if isinstance(value, spaces.Space)}
        self.own = {name: value for name, value in vars(task_env).items() if name not in shared | spaces_too}
        self.still = {name: getattr(self.model, name).copy() for name in ("body_pos", "site_pos")}
        self.inside: MetaWorldEnv | None = None
        self.renderers: dict[int, Any] = {}

    def enter(self, env: MetaWorldEnv, *, begin: bool = False) -> None:
        """Put an environment into the model; with begin, as the task was when it was made."""
        if self.inside is not None and (begin or self.inside is not env):
            # resets move bodies and sites of the model: who leaves takes them along
            self.inside.moved = {name: getattr(self.model, name).copy() for name in self.still}
        if begin:
            env.moved = self.still
            if env.inner is None:
                env.inner = object.__new__(type(self.made))  # copy.copy would load another model
                vars(env.inner).update(vars(self.made))
                env.inner.data = _mujoco().MjData(self.model)
            vars(env.inner).update(copy.deepcopy(self.own))
            for side in ("left", "right"):  # live views of where the fingers are
                setattr(env.inner, f"init_{side}_pad", env.inner.get_body_com(f"{side}pad"))
        if begin or self.inside is not env:
            for name, value in env.moved.items():
                getattr(self.model, name)[:] = value
        self.inside = env

    def picture(self, data: Any, size: int) -> NDArray[np.uint8]:
        """Turned by 180 degrees."""
        return np.ascontiguousarray(self.seen(data, size).render()[::-1, ::-1])

    def seen(self, data: Any, size: int) -> Any:
        """The renderer of this size, with the scene before its camera."""
        if size not in self.renderers:
            self.renderers[size] = renderer(_mujoco(), self.model, size)
        self.renderers[size].update_scene(data, camera=CAMERA)
        return self.renderers[size]


@cache
def _scene(task: str) -> _Scene:
    return _Scene(task)


def _task_class(task: str) -> Any:
    _mujoco()
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    except ModuleNotFoundError as error:
        raise Misuse(f"Meta-World needs {error.name}: {install('metaworld')}") from error
    return ALL_V3_ENVIRONMENTS[task]


def _mujoco() -> Any:
    return import_mujoco("Meta-World", "metaworld")


def _named(seen: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    return {"environment_state": seen, "agent_pos": seen[:PROPRIOCEPTION]}


INSTRUCTIONS = {
    "assembly-v3": "put the ring of the wrench over the peg",
    "basketball-v3": "drop the ball into the basket",
    "bin-picking-v3": "move the cube from one bin to the other",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "press the button behind the wall from above",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "press the button behind the wall",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "lift the ring of the wrench off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "hand-insert-v3": "put the hand into the hole",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-open-v3": "open the faucet",
    "faucet-close-v3": "close the faucet",
    "hammer-v3": "drive the nail in with the hammer",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "push the peg into the hole from the side",
    "pick-place-wall-v3": "lift the puck over the wall to the goal",
    "pick-out-of-hole-v3": "lift the puck out of the hole",
    "reach-v3": "move the hand to the goal",
    "push-back-v3": "push the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "lift the puck to the goal",
    "plate-slide-v3": "slide the plate into the net",
    "plate-slide-side-v3": "slide the plate sideways into the net",
    "plate-slide-back-v3": "slide the plate back out of the net",
    "plate-slide-back-side-v3": "slide the plate back sideways out of the net",
    "peg-unplug-side-v3": "pull the plug out sideways",
    "soccer-v3": "push the ball into the net",
    "stick-push-v3": "push the box with the stick",
    "stick-pull-v3": "pull the box with the stick",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-wall-v3": "move the hand around the wall to the goal",
    "shelf-place-v3": "put the puck on the shelf",
    "sweep-into-v3": "sweep the puck into the hole",
    "sweep-v3": "sweep the box off the table",
    "window-open-v3": "open the window",
    "window-close-v3": "close the window",
}
MAX_STEPS = 500
"""Meta-World's own limit."""


def checked(tasks: Sequence[str]) -> tuple[str, ...]:
    """The tasks, all fifty where there are none. Raises ValueError for an unknown one, with the nearest."""
    for name in tasks:
        if name not in INSTRUCTIONS:
            near = difflib.get_close_matches(name, INSTRUCTIONS, n=1, cutoff=0.3)
            raise ValueError(f"Meta-World has no task {name!r}; the nearest is {near[0] if near else 'reach-v3'!r}")
    return tuple(tasks) or tuple(INSTRUCTIONS)
