"""ManiSkill 3 (arXiv 2410.00425): one environment per slot on the CPU, or all slots as one batch on a GPU.

Tasks are ids ("PickCube-v1"). States come from `obs_mode="state"`; the picture is that of the first camera, rendered
once per chunk. ManiSkill needs a Vulkan driver even for states: on a CPU Mesa's lavapipe from 24.3 on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from genrl.vla.simulators.contract import Batch, Description, Flags, Misuse, Observation, Reading
from genrl.vla.simulators.simulator import SlotHost, as_picture, seed_of

MAX_STEPS = 80
"""Where none is said: pi_RL's."""


@runtime_checkable
class Speaks(Protocol):
    """A task with sentences of its own, one per environment."""

    def get_language_instruction(self) -> Sequence[str]: ...


@runtime_checkable
class OnDevice(Protocol):
    """A tensor."""

    def cpu(self) -> Any: ...


def describe(tasks: Sequence[str], reading: Reading, settings: Mapping[str, Any]) -> Description:
    """Describes these tasks. settings: of `gymnasium.make`; `sim_backend: gpu` makes one batch of one task."""
    names = tuple(tasks) or ("PickCube-v1",)
    limit = MAX_STEPS if reading.max_steps is None else reading.max_steps
    arguments = {
        "tasks": names,
        "reading": replace(reading, success_key="success", max_steps=limit),
        "settings": settings,
    }
    return Description(host, arguments, len(names), limit)


def host(slots: int, *, tasks: Sequence[str], reading: Reading, settings: Mapping[str, Any]) -> SlotHost | BatchHost:
    """See `describe`."""
    if str(settings.get("sim_backend", "cpu")).endswith("cpu"):
        return SlotHost(
            lambda task: ManiSkillEnv(made(tasks[task], 1, reading, settings), reading), len(tasks), reading
        )
    if len(tasks) > 1:
        raise Misuse(f"a batch of ManiSkill on a GPU is of one task, not of {list(tasks)}: give each a run of its own")
    return BatchHost(made(tasks[0], slots, reading, settings), slots, reading)


def made(task: str, count: int, reading: Reading, settings: Mapping[str, Any]) -> Any:
    """The environment itself, without wrappers that end episodes or begin them."""
    try:
        import mani_skill.envs  # noqa: F401 - registers the tasks
    except ModuleNotFoundError as error:
        raise Misuse("ManiSkill is not installed: pip install mani-skill (see docs/vla_simulators.md)") from error
    how: dict[str, Any] = {"obs_mode": "state", "sim_backend": "physx_cpu", "render_mode": "rgb_array"}
    if "render_backend" not in settings and how["sim_backend"] == settings.get("sim_backend", "physx_cpu"):
        how["render_backend"] = "cpu"
    if reading.image_size:
        how["sensor_configs"] = {"width": reading.image_size, "height": reading.image_size}
    return gymnasium.make(task, num_envs=count, **{**how, **settings}).unwrapped


def sentence(env: Any, reading: Reading) -> list[str]:
    """The tasks' own sentences, or the one that was given, or the words of the id: "pick cube"."""
    if isinstance(env, Speaks):
        return [str(line) for line in env.get_language_instruction()]
    words = re.sub(r"-v\d+$", "", env.spec.id)
    return [reading.instruction or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", words).lower()] * env.num_envs


def observed(env: Any, image_size: int) -> Observation:
    """What all environments show: "agent_pos", the joints, "environment_state", and "pixels" if they are wanted."""
    observation = {"agent_pos": array(env.agent.robot.get_qpos()), "environment_state": array(env.get_obs())}
    return observation | ({"pixels": pictures(env)} if image_size else {})


def pictures(env: Any) -> NDArray[np.uint8]:
    """Picture of the first camera, [n, H, W, 3]."""
    return array(next(iter(env.get_sensor_images().values()))["rgb"])


def array(value: Any) -> NDArray[Any]:
    """A tensor as an array on the CPU."""
    values: NDArray[Any] = np.asarray(value.cpu() if isinstance(value, OnDevice) else value)
    return values.astype(np.float32) if values.dtype.kind == "f" else values


class ManiSkillEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """A batch of one, as a single environment. info["success"]; a task that says "fail" ends."""

    def __init__(self, env: Any, reading: Reading) -> None:
        self.env, self.reading = env, reading
        self.task_description = ""
        box = env.single_action_space
        self.action_space = spaces.Box(box.low, box.high, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Any]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.env.reset(seed=seed)
        self.task_description = sentence(self.env, self.reading)[0]
        return self._observation(), {"success": False}

    def step(self, action: NDArray[np.float32]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """One action."""
        _, reward, terminated, _, info = self.env.step(action)
        info_out = {"success": bool(array(info["success"])[0])}
        return self._observation(), float(array(reward)[0]), bool(array(terminated)[0]), False, info_out

    def picture(self, size: int) -> NDArray[np.uint8]:
        """Picture of the first camera."""
        return as_picture(pictures(self.env)[0], size, self.env.spec.id)

    def close(self) -> None:
        """Close the simulator."""
        self.env.close()

    def _observation(self) -> Observation:
        return {name: value[0] for name, value in observed(self.env, 0).items()}


class BatchHost(Batch):
    """All slots in one batched environment. Those whose episode has ended are stepped along, and not looked at."""

    def __init__(self, env: Any, slots: int, reading: Reading) -> None:
        limit = MAX_STEPS if reading.max_steps is None else reading.max_steps
        super().__init__(slots, reading.chunk, limit, env.single_action_space.shape[-1])
        self.env, self.reading = env, reading
        self.shown: Observation = {}

    def begin(self, episodes: Mapping[int, int]) -> None:
        """One by one, because ManiSkill seeds a batch as a whole: a start must be a function of its own seed."""
        import torch

        for slot, episode in episodes.items():
            index = torch.tensor([slot], device=self.env.device)
            self.env.reset(seed=[seed_of(episode, self.reading)] * self.slots, options={"env_idx": index})
        self.keep(np.isin(np.arange(self.slots), list(episodes)))

    def act(self, actions: NDArray[np.float32], alive: Flags) -> tuple[NDArray[Any], Flags, Flags]:
        """See `Batch`."""
        import torch

        box = self.env.single_action_space
        bounded = np.clip(actions, box.low, box.high).astype(np.float32)
        _, reward, over, _, info = self.env.step(torch.from_numpy(bounded).to(self.env.device))
        success = array(info["success"]).astype(bool)
        return success if self.reading.reward == "success" else array(reward), success, array(over).astype(bool)

    def keep(self, rows: Flags) -> None:
        """See `Batch`."""
        if rows.any():
            self.shown = kept(self.shown, observed(self.env, self.reading.image_size), rows)

    def observe(self) -> Observation:
        return self.shown

    def instructions(self) -> list[str]:
        return sentence(self.env, self.reading)

    def render(self, slots: list[int], size: int) -> NDArray[np.uint8]:
        """Picture of the first camera."""
        images = pictures(self.env)
        return np.stack([as_picture(images[slot], size, "ManiSkill") for slot in slots])

    def close(self) -> None:
        """Close the simulator."""
        self.env.close()


def kept(shown: Observation, now: Observation, rows: NDArray[np.bool_]) -> Observation:
    """What was shown, with these rows as they are now."""
    if not shown:
        return {name: value.copy() for name, value in now.items()}
    for name, value in now.items():
        shown[name][rows] = value[rows]
    return shown
