"""ManiSkill 3 (arXiv 2410.00425): one environment per slot on the CPU, or all slots as one batch on a GPU.

Tasks are ids ("PickCube-v1"). States come from `obs_mode="state"`; the picture is that of the first camera, drawn once
per chunk. ManiSkill needs a Vulkan driver even for states: on a CPU Mesa's lavapipe from 24.3 on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from genrl.vla.simulators.simulator import (
    Draw,
    Frames,
    Misuse,
    Observation,
    Outcome,
    Reading,
    Run,
    SlotHost,
    as_picture,
    seed_of,
)

MAX_STEPS = 80
"""Where none is said: pi_RL's."""


def host(slots: int, *, tasks: Sequence[str], reading: Reading, settings: Mapping[str, Any]) -> SlotHost | BatchHost:
    """Slots of these tasks. settings: of `gymnasium.make`; `sim_backend: gpu` makes one batch of one task."""
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
    if hasattr(env, "get_language_instruction"):
        return [str(line) for line in env.get_language_instruction()]
    words = re.sub(r"-v\d+$", "", env.spec.id)
    return [reading.instruction or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", words).lower()] * env.num_envs


def observed(env: Any, image_size: int) -> Observation:
    """What all environments show: "agent_pos", the joints, "environment_state", and "pixels" if they are wanted."""
    shown = {"agent_pos": array(env.agent.robot.get_qpos()), "environment_state": array(env.get_obs())}
    return shown | ({"pixels": pictures(env)} if image_size else {})


def pictures(env: Any) -> NDArray[np.uint8]:
    """Of the first camera, [n, H, W, 3]."""
    return array(next(iter(env.get_sensor_images().values()))["rgb"])


def array(value: Any) -> NDArray[Any]:
    """A tensor as an array on the CPU."""
    found: NDArray[Any] = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    return found.astype(np.float32) if found.dtype.kind == "f" else found


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
        found = {"success": bool(array(info["success"])[0])}
        return self._observation(), float(array(reward)[0]), bool(array(terminated)[0]), False, found

    def picture(self, size: int) -> NDArray[np.uint8]:
        """Of the first camera."""
        return as_picture(pictures(self.env)[0], size, self.env.spec.id)

    def close(self) -> None:
        """Close the simulator."""
        self.env.close()

    def _observation(self) -> Observation:
        return {name: value[0] for name, value in observed(self.env, 0).items()}


class BatchHost:
    """All slots in one batched environment. Those whose episode has ended are stepped along, and not looked at."""

    def __init__(self, env: Any, slots: int, reading: Reading) -> None:
        self.env, self.slots, self.reading = env, slots, reading
        self.elapsed = np.zeros(slots, dtype=np.int64)

    def run(self, work: Run) -> Iterator[Outcome]:
        """One message for all slots: first the chunks, in lock step, then the episodes that begin, one by one.

        One by one, because ManiSkill seeds a batch as a whole: a start must be a function of its own seed.
        """
        import torch

        how, box = self.reading, self.env.single_action_space
        chosen = np.array(sorted(work.begin.keys() | work.chunks.keys()), dtype=np.int64)
        chunks = np.zeros((self.slots, how.chunk, *box.shape), dtype=np.float32)
        for slot, chunk in work.chunks.items():
            chunks[slot] = np.clip(chunk, box.low, box.high)
        alive = np.isin(np.arange(self.slots), list(work.chunks))
        rewards = np.zeros((self.slots, how.chunk), dtype=np.float32)
        n_executed = np.zeros(self.slots, dtype=np.int64)
        terminated, truncated, succeeded = (np.zeros(self.slots, dtype=np.bool_) for _ in range(3))
        shown: Observation = {}
        limit = MAX_STEPS if how.max_steps is None else how.max_steps
        for k in range(how.chunk):
            if not alive.any():
                break
            _, reward, over, _, info = self.env.step(torch.from_numpy(chunks[:, k]).to(self.env.device))
            success = alive & array(info["success"]).astype(bool)
            rewards[alive, k] = (success if how.reward == "success" else array(reward))[alive]
            n_executed += alive
            self.elapsed += alive
            succeeded |= success
            terminated |= alive & (array(over).astype(bool) | success)
            truncated |= alive & ~terminated & (self.elapsed >= limit)
            ended = alive & (terminated | truncated)
            alive = alive & ~ended
            if ended.any() or k == how.chunk - 1:
                shown = kept(shown, observed(self.env, how.image_size), ended | alive)
        for slot, episode in work.begin.items():
            one = torch.tensor([slot], device=self.env.device)
            self.env.reset(seed=[seed_of(episode, how)] * self.slots, options={"env_idx": one})
            self.elapsed[slot] = 0
        if work.begin:
            shown = kept(shown, observed(self.env, how.image_size), np.isin(np.arange(self.slots), list(work.begin)))
        said = sentence(self.env, how)
        yield Outcome(
            chosen,
            {name: value[chosen] for name, value in shown.items()},
            rewards[chosen],
            n_executed[chosen],
            terminated[chosen],
            truncated[chosen],
            succeeded[chosen],
            [said[slot] for slot in chosen],
            box.shape[-1],
        )

    def draw(self, work: Draw) -> Frames:
        """Of the first camera."""
        drawn = pictures(self.env)
        return Frames(np.stack([as_picture(drawn[slot], work.size, "ManiSkill") for slot in work.slots]))

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
