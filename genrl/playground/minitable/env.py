"""MiniTable as a simulator of many slots, and as a vector environment in this process.

The table as pictures from above, of all tables at once, only the few pixels under a disc being touched; and as a
cloud of points, in which what stands on it has a height of its own, for a cloud has no colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.playground.minitable import task
from genrl.playground.minitable.task import (
    INSTRUCTIONS,
    MAX_STEPS,
    PUT,
    ZONE_CENTRES,
    ZONE_RADIUS,
    Floats,
    State,
    task_numbers,
)
from genrl.vla.simulators.contract import Batch, Description, Flags, Observation, Reading, Simulation
from genrl.vla.simulators.tables import Simulators

Pixels = NDArray[np.uint8]

VIEW = 1.1
"""Half the width of the picture: the table [-1, 1]^2 and a margin."""
DISC_RADIUS = 0.11
GRIPPER_RADIUS = 0.075
_TABLE, _MARGIN, _ZONE = (232, 226, 214), (150, 142, 130), (196, 186, 166)
_DISC_COLOURS = ((214, 40, 40), (40, 160, 60), (40, 80, 214))
_OPEN, _CLOSED = (90, 90, 90), (0, 0, 0)
THINGS = 7
"""Discs, the gripper, zones."""
HEIGHTS = (0.1, 0.2, 0.3)
"""Of the red, green and blue disc; zones are flat, and the gripper is above all, at `GRIPPER_HEIGHT`."""
GRIPPER_HEIGHT = 0.5
_RADII = np.array([DISC_RADIUS] * 3 + [GRIPPER_RADIUS] + [ZONE_RADIUS] * 3)
_LEVELS = np.array([*HEIGHTS, GRIPPER_HEIGHT, 0.0, 0.0, 0.0])


def render(state: State, size: int) -> Pixels:
    """[n, size, size, 3] uint8 RGB, row 0 at the far edge. The gripper is grey when open and black when it holds.

    Edges are blended by how much of a pixel they cover, so that positions show below the size of a pixel.
    Raises ValueError for a size below 16, at which discs vanish.
    """
    if size < 16:
        raise ValueError(f"a picture of {size} pixels cannot show the discs; 16 or more")
    pixel = 2.0 * VIEW / size
    margin = math.ceil(DISC_RADIUS / pixel) + 2
    canvas = np.repeat(_background(size, margin), len(state.task), axis=0)
    for disc, colour in enumerate(_DISC_COLOURS):
        _draw(canvas, state.discs[:, disc], DISC_RADIUS, np.array(colour, dtype=np.float32), size, margin)
    colours = np.where((state.held >= 0)[:, None, None, None], _CLOSED, _OPEN).astype(np.float32)
    _draw(canvas, state.gripper, GRIPPER_RADIUS, colours, size, margin)
    return np.ascontiguousarray(canvas[:, margin:-margin, margin:-margin])


def _draw(canvas: Pixels, centre: Floats, radius: float, colour: Floats, size: int, margin: int) -> None:
    """Blend one disc per table into canvas [n, size + 2 margin, .., 3]; centre [n, 2], colour [3] or [n, 1, 1, 3]."""
    pixel = 2.0 * VIEW / size
    column = (centre[:, 0] + VIEW) / pixel - 0.5
    row = (VIEW - centre[:, 1]) / pixel - 0.5
    half = math.ceil(radius / pixel + 0.5)
    offsets = np.arange(-half, half + 1)
    rows = np.clip(np.rint(row).astype(np.int64), -1, size)[:, None] + offsets
    columns = np.clip(np.rint(column).astype(np.int64), -1, size)[:, None] + offsets
    distance = np.hypot((rows - row[:, None])[:, :, None], (columns - column[:, None])[:, None, :])
    cover = np.clip(radius / pixel - distance + 0.5, 0.0, 1.0)[..., None].astype(np.float32)
    at = np.arange(len(canvas))[:, None, None], (rows + margin)[:, :, None], (columns + margin)[:, None, :]
    under = canvas[at].astype(np.float32)
    canvas[at] = np.rint(under + cover * (colour - under)).astype(np.uint8)


@lru_cache(maxsize=8)
def _background(size: int, margin: int) -> Pixels:
    """Table and zones, [1, size + 2 margin, size + 2 margin, 3]."""
    pixel = 2.0 * VIEW / size
    place = (np.arange(-margin, size + margin) + 0.5) * pixel - VIEW
    x, y = np.meshgrid(place, -place)
    outside = np.clip((np.maximum(np.abs(x), np.abs(y)) - 1.0) / pixel + 0.5, 0.0, 1.0)
    picture = np.array(_TABLE) + outside[..., None] * (np.array(_MARGIN) - np.array(_TABLE))
    for centre in ZONE_CENTRES:
        cover = np.clip((ZONE_RADIUS - np.hypot(x - centre[0], y - centre[1])) / pixel + 0.5, 0.0, 1.0)[..., None]
        picture += cover * (np.array(_ZONE) - picture)
    background: Pixels = np.rint(picture).astype(np.uint8)[None]
    background.setflags(write=False)
    return background


def cloud(state: State, count: int) -> Floats:
    """[n, count, 3], seen from above: the tops of the discs, the gripper and the zones, points spread evenly over each
    (a sunflower's spiral) and dealt out to the seven in turn. Nothing hides anything.

    Raises ValueError for fewer points than there are things.
    """
    if count < THINGS:
        raise ValueError(f"{count} points cannot show the {THINGS} things on the table")
    thing, rank = np.arange(count) % THINGS, np.arange(count) // THINGS
    share = np.bincount(thing)[thing]
    radius, angle = _RADII[thing] * np.sqrt((rank + 0.5) / share), rank * math.pi * (3.0 - math.sqrt(5.0))
    zones = np.broadcast_to(ZONE_CENTRES, (len(state.task), 3, 2))
    centres = np.concatenate([state.discs, state.gripper[:, None], zones], 1)[:, thing]
    flat = centres + np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    levels = np.broadcast_to(_LEVELS[thing][:, None], (len(state.task), count, 1))
    return np.concatenate([flat, levels], 2).astype(np.float32)


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
