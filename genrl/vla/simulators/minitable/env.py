"""MiniTable as a gymnasium vector environment whose action is a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from genrl.vla.simulators.minitable import task
from genrl.vla.simulators.minitable.render import Pixels, render
from genrl.vla.simulators.minitable.task import INSTRUCTIONS, MAX_STEPS, PUT, Flags, Floats, State

Observation = dict[str, NDArray[Any]]


class MiniTable(VectorEnv[Observation, Floats, NDArray[Any]]):
    """`num_envs` tables; a step is a decision, which executes up to `chunk` actions and stops where the episode ends.

    Actions [n, chunk, 3] in [-1, 1] (see `task`). Observations, LeRobot's names: "pixels" uint8 [n, S, S, 3] (left out
    where image_size is 0), "agent_pos" float32 [n, 3] (gripper and whether it holds), "environment_state" float32
    [n, 6] (the discs: for state policies, not for those that must look), "task_index" int64 [n], a number of
    `INSTRUCTIONS`. Reward 1 at success, which terminates; max_steps actions without it truncate.

    Next-step auto-reset, as gymnasium defines it: the observation of the decision that ended an episode is its final
    one; the next decision of that table ignores its action, executes nothing and returns the first observation of the
    next episode with reward 0. info has "rewards" float32 [n, chunk], "n_executed" int64 [n] (0 for a reset) and
    "is_success" bool [n].

    Episode k of table i is a function of (seed, i // group_size, k): the tables of a group see the same episodes, as
    GRPO needs. i counts from `first_slot`, where other processes have the tables before.
    `reset(options={"episodes": uint64 [n]})` chooses the episodes by number: fixed lists to evaluate on.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        tasks: Sequence[int] = PUT,
        image_size: int = 32,
        chunk: int = 4,
        max_steps: int = MAX_STEPS,
        group_size: int = 1,
        render_size: int = 128,
    ) -> None:
        if num_envs < 1 or chunk < 1 or max_steps < 1 or group_size < 1 or num_envs % group_size:
            raise ValueError(
                "num_envs, chunk, max_steps and group_size must be positive and groups complete; got "
                f"{num_envs}, {chunk}, {max_steps} and {group_size}"
            )
        self.num_envs, self.tasks, self.image_size, self.chunk = num_envs, tuple(tasks), image_size, chunk
        self.max_steps, self.group_size, self.render_size = max_steps, group_size, render_size
        self.first_slot = 0
        self.render_mode = "rgb_array"
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": ["rgb_array"], "render_fps": 10}
        self.single_action_space = spaces.Box(-1.0, 1.0, (chunk, 3), np.float32)
        parts: dict[str, spaces.Space[Any]] = {
            "agent_pos": spaces.Box(-1.0, 1.0, (3,), np.float32),
            "environment_state": spaces.Box(-1.0 - task.GRASP, 1.0 + task.GRASP, (6,), np.float32),
            "task_index": spaces.Discrete(len(INSTRUCTIONS)),
        }
        if image_size:
            parts["pixels"] = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self.single_observation_space = spaces.Dict(parts)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._seed: int | None = None
        self._count = np.zeros(num_envs, dtype=np.int64)
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._ended = np.zeros(num_envs, dtype=np.bool_)
        self._state = task.initial_state(np.zeros(num_envs, dtype=np.uint64), self.tasks)

    @property
    def task_description(self) -> list[str]:
        """The instruction of each table."""
        return [INSTRUCTIONS[number] for number in self._state.task]

    @property
    def state(self) -> State:
        """The tables themselves, for the expert."""
        return self._state

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode on every table, or on those of options["reset_mask"] (bool [n]).

        With a seed: episode 0 of it. Without: the next episode of each (of a random seed the first time).
        options["episodes"]: uint64 [n], the numbers of the episodes instead.
        """
        options = options or {}
        unknown = set(options) - {"episodes", "reset_mask"}
        if unknown:
            raise ValueError(f"MiniTable knows the reset options 'episodes' and 'reset_mask', not {sorted(unknown)}")
        chosen = np.asarray(options.get("reset_mask", np.ones(self.num_envs, dtype=np.bool_)))
        if chosen.shape != (self.num_envs,) or chosen.dtype != np.bool_:
            raise ValueError(f"reset_mask must be bool [{self.num_envs}], got {chosen.dtype} {list(chosen.shape)}")
        if seed is not None:
            super().reset(seed=seed)
            self._seed = seed
            self._count[chosen] = 0
        elif self._seed is None:
            self._seed = int(self.np_random.integers(2**63))
        else:
            self._count[chosen] += 1
        keys = self._keys()
        if "episodes" in options:
            keys = np.asarray(options["episodes"]).astype(np.uint64)
            if keys.shape != (self.num_envs,):
                raise ValueError(f"episodes must be [{self.num_envs}], got {list(keys.shape)}")
        self._begin(chosen, keys)
        return self._observe(), self._info(np.zeros((self.num_envs, self.chunk)), np.zeros(self.num_envs))

    def step(self, actions: Floats) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Execute a chunk on every table whose episode goes on; begin the next episode on the others."""
        if self._seed is None:
            raise RuntimeError("call reset before step")
        chunks = np.asarray(actions, dtype=np.float32)
        if chunks.shape != (self.num_envs, self.chunk, 3):
            raise ValueError(f"actions must have shape [{self.num_envs}, {self.chunk}, 3], got {list(chunks.shape)}")
        resetting = self._ended
        alive = ~resetting
        if not np.isfinite(chunks[alive]).all():
            bad = np.flatnonzero(alive & ~np.isfinite(chunks).all((1, 2)))
            raise ValueError(f"the actions for the tables {bad.tolist()} are not finite: look at the policy")
        rewards = np.zeros((self.num_envs, self.chunk), dtype=np.float32)
        n_executed = np.zeros(self.num_envs, dtype=np.int64)
        terminated = np.zeros(self.num_envs, dtype=np.bool_)
        for k in range(self.chunk):
            moved = task.step(self._state.rows(alive), chunks[alive, k])
            self._state = self._state.replaced(alive, moved)
            n_executed += alive
            self._elapsed += alive
            success = alive & task.is_success(self._state)
            rewards[success, k] = 1.0
            terminated |= success
            alive = alive & ~success & (self._elapsed < self.max_steps)
            if not alive.any():
                break
        truncated = ~resetting & ~terminated & (self._elapsed >= self.max_steps)
        if resetting.any():
            self._count[resetting] += 1
            self._begin(resetting, self._keys())
        self._ended = terminated | truncated
        return self._observe(), rewards.sum(1), terminated, truncated, self._info(rewards, n_executed)

    def frames(self, size: int) -> Pixels:
        """Pictures of all tables, uint8 [n, size, size, 3]."""
        return render(self._state, size)

    def render(self) -> tuple[Pixels, ...]:
        """The same at render_size, as gymnasium wants them."""
        return tuple(self.frames(self.render_size))

    def state_dict(self) -> dict[str, Any]:
        """All that changes: an environment that loads it goes on as this one would, bit for bit."""
        arrays = {"count": self._count, "elapsed": self._elapsed, "ended": self._ended} | self._state._asdict()
        return {"seed": self._seed} | {name: array.copy() for name, array in arrays.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from `state_dict` of an environment with the same settings."""
        if len(saved["count"]) != self.num_envs:
            raise ValueError(
                f"the saved state is of {len(saved['count'])} tables, this environment has {self.num_envs}"
            )
        self._seed = saved["seed"]
        self._count, self._elapsed, self._ended = (saved[name].copy() for name in ("count", "elapsed", "ended"))
        self._state = State(*(saved[name].copy() for name in State._fields))

    def _keys(self) -> task.Keys:
        assert self._seed is not None
        slots = self.first_slot + np.arange(self.num_envs)
        return task.episode_keys(self._seed, slots // self.group_size, self._count)

    def _begin(self, chosen: Flags, keys: task.Keys) -> None:
        self._state = self._state.replaced(chosen, task.initial_state(keys[chosen], self.tasks))
        self._elapsed[chosen] = 0
        self._ended = self._ended & ~chosen

    def _observe(self) -> Observation:
        state = self._state
        seen: Observation = {
            "agent_pos": np.concatenate([state.gripper, (state.held >= 0)[:, None].astype(np.float32)], 1),
            "environment_state": state.discs.reshape(self.num_envs, 6).copy(),
            "task_index": state.task.copy(),
        }
        return seen | {"pixels": self.frames(self.image_size)} if self.image_size else seen

    def _info(self, rewards: NDArray[Any], n_executed: NDArray[Any]) -> dict[str, Any]:
        return {
            "rewards": rewards.astype(np.float32),
            "n_executed": n_executed.astype(np.int64),
            "is_success": rewards.any(1),
        }
