"""MiniTable as a simulator of many slots, and as a vector environment in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.playground.minitable import task
from genrl.playground.minitable.render import cloud, render
from genrl.playground.minitable.task import INSTRUCTIONS, MAX_STEPS, PUT, Floats, State, task_numbers
from genrl.vla.simulators.contract import Batch, Description, Flags, Observation, Reading, Simulation
from genrl.vla.simulators.tables import Simulators


class TableHost(Batch):
    """`slots` tables. Actions [n, chunk, 3] in [-1, 1] (see `task`); reward 1 at success.

    Observations: "pixels" uint8 [n, S, S, 3] (left out where image_size is 0), "environment_points" float32 [n, N, 3]
    (where points is 0), "agent_pos" float32 [n, 3] (gripper and whether it holds), "environment_state" float32 [n, 6]
    (the discs: for state policies, not for those that must look), "task_index" int64 [n], a number of `INSTRUCTIONS`.
    """

    def __init__(
        self, slots: int, *, tasks: Sequence[int], chunk: int, image_size: int, points: int, max_steps: int
    ) -> None:
        super().__init__(slots, chunk, max_steps, 3)
        self.tasks, self.image_size, self.points = tuple(tasks), image_size, points
        self.state = task.initial_state(np.zeros(slots, dtype=np.uint64), self.tasks)

    def begin(self, episodes: Mapping[int, int]) -> None:
        """A table is a function of its episode's number."""
        slots = np.array(sorted(episodes))
        chosen = np.isin(np.arange(self.slots), slots)
        keys = np.array([episodes[slot] for slot in slots], dtype=np.uint64)
        self.state = self.state.replaced(chosen, task.initial_state(keys, self.tasks))

    def act(self, actions: Floats, alive: Flags) -> tuple[Floats, Flags, Flags]:
        """Success ends an episode."""
        self.state = self.state.replaced(alive, task.step(self.state.rows(alive), actions[alive]))
        success = task.is_success(self.state)
        return success.astype(np.float32), success, success

    def observe(self) -> Observation:
        state = self.state
        observation: Observation = {
            "agent_pos": np.concatenate([state.gripper, (state.held >= 0)[:, None].astype(np.float32)], 1),
            "environment_state": state.discs.reshape(self.slots, 6),
            "task_index": state.task,
        }
        if self.image_size:
            observation["pixels"] = render(state, self.image_size)
        if self.points:
            observation["environment_points"] = cloud(state, self.points)
        return observation

    def instructions(self) -> list[str]:
        return [INSTRUCTIONS[number] for number in self.state.task]

    def render(self, slots: list[int], size: int) -> NDArray[np.uint8]:
        """See `contract.Host`."""
        return render(self.state.rows(np.array(slots)), size)

    def advise(self, slots: list[int], horizon: int) -> NDArray[np.float32]:
        """See `contract.Host`."""
        return task.expert_chunk(self.state.rows(np.array(slots)), horizon)


def describe(tasks: Sequence[str], reading: Reading, settings: Mapping[str, Any]) -> Description:
    """Tables with these instructions (or "put", "touch"). Raises ValueError for what is not for MiniTable."""
    if settings:
        raise ValueError(f"minitable has no settings, got {sorted(settings)}")
    if reading.goals or reading.instruction or reading.proprioception:
        raise ValueError("goals, instruction and proprioception are not for minitable, which has its own")
    limit = MAX_STEPS if reading.max_steps is None else reading.max_steps
    arguments = {"tasks": task_numbers(tasks), "chunk": reading.chunk, "image_size": reading.image_size}
    arguments |= {"points": reading.points, "max_steps": limit}
    return Description(TableHost, arguments, max_steps=limit)  # one task: a table has its own


class MiniTable(Simulators):
    """`num_envs` tables in this process, as a `contract.Environment`; `state` is what they are, for an expert.

    tasks: numbers of `INSTRUCTIONS`.
    """

    max_steps: int

    def __init__(
        self,
        num_envs: int,
        *,
        tasks: Sequence[int] = PUT,
        image_size: int = 32,
        points: int = 0,
        chunk: int = 4,
        max_steps: int = MAX_STEPS,
        group_size: int = 1,
    ) -> None:
        arguments = {"tasks": tasks, "chunk": chunk, "image_size": image_size, "points": points, "max_steps": max_steps}
        described = Description(TableHost, arguments, max_steps=max_steps)
        super().__init__(described, Simulation("minitable", num_envs=num_envs, chunk=chunk, group_size=group_size))

    @property
    def state(self) -> State:
        """The tables, once they have been reset."""
        state: State = self.host.state  # type: ignore[union-attr]
        return state
