"""The table: its episodes, its dynamics, success, and an expert that always succeeds.

A gripper moves over a square table [-1, 1]^2 (x to the right, y away) with three discs, red, green and blue, and three
zones at its left, right and far edges. An instruction asks to put one disc into one zone, or to touch one. Actions are
(dx, dy, grip) in [-1, 1]: a move of up to `REACH` along each axis, then grip > 0 takes hold of the nearest disc within
`GRASP` (a disc that is held moves along), anything else lets go. Deterministic: an episode is a function of its number.

Arrays are numpy; n is the number of tables. Lengths are in half table widths.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genrl.vla.simulators.contract import Keys, spread
from genrl.vla.simulators.contract import episode_keys as episode_keys

COLOURS = ("red", "green", "blue")
ZONES = ("left", "right", "far")
PUT = tuple(range(9))
TOUCH = tuple(range(9, 12))
INSTRUCTIONS = (
    *(f"put the {colour} block in the {zone} zone" for colour in COLOURS for zone in ZONES),
    *(f"touch the {colour} block" for colour in COLOURS),
)
"""Instruction of each task number: 0-8 `PUT` (3 colour + zone), 9-11 `TOUCH` (9 + colour)."""

ZONE_CENTRES = np.array([[-0.8, 0.0], [0.8, 0.0], [0.0, 0.8]], dtype=np.float32)
ZONE_RADIUS = 0.25
REACH = 0.12
GRASP = 0.12
MAX_STEPS = 40

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class State(NamedTuple):
    """gripper [n, 2], discs [n, 3, 2], held [n] (the disc in hand, or -1), task [n] (the number of an instruction)."""

    gripper: Floats
    discs: Floats
    held: Integers
    task: Integers

    def rows(self, index: NDArray[Any] | slice) -> State:
        """The tables `index` (numbers, a mask or a slice)."""
        return State(self.gripper[index], self.discs[index], self.held[index], self.task[index])

    def replaced(self, mask: Flags, rows: State) -> State:
        """Put `rows` (as many as are set) in the place of the tables where the mask [n] is."""
        copies = State(*(array.copy() for array in self))  # type: ignore[arg-type]
        copies.gripper[mask], copies.discs[mask] = rows.gripper, rows.discs
        copies.held[mask], copies.task[mask] = rows.held, rows.task
        return copies


class Demonstrations(NamedTuple):
    """Expert episodes, padded to the longest, T: entry [:, t] is the table before action t.

    gripper [n, T, 2], discs [n, T, 3, 2], held [n, T], task [n], actions [n, T, 3], length [n] steps until success.
    Padding repeats the final state; its actions stand still with the last grip.
    """

    gripper: Floats
    discs: Floats
    held: Integers
    task: Integers
    actions: Floats
    length: Integers


def task_numbers(names: Sequence[str]) -> tuple[int, ...]:
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


def initial_state(episodes: Keys, tasks: Sequence[int]) -> State:
    """The start of each episode: one of the tasks, the gripper near the front edge, discs apart from it and each other.

    A row depends on its own number alone. Gripper uniform +-.3 round (0, -.6); discs uniform +-.45, .36 apart and .25
    from the gripper, by rejection.
    """
    if not tasks or not set(tasks) <= set(range(len(INSTRUCTIONS))):
        raise ValueError(f"tasks must be numbers of instructions, 0 to {len(INSTRUCTIONS) - 1}, got {list(tasks)}")
    choices = np.asarray(tasks, dtype=np.int64)
    first = _uniform(episodes, 0, 3)
    gripper = np.array([0.0, -0.6]) + 0.6 * (first[:, :2] - 0.5)
    discs = np.zeros((len(episodes), 3, 2))
    open_rows, stream, candidates = np.arange(len(episodes)), 1, 16
    while len(open_rows):
        places = 0.9 * (_uniform(episodes[open_rows], stream, candidates * 6) - 0.5)
        places = places.reshape(len(open_rows), candidates, 3, 2)
        between = np.linalg.norm(places[:, :, (0, 0, 1)] - places[:, :, (1, 2, 2)], axis=-1).min(-1)
        from_gripper = np.linalg.norm(places - gripper[open_rows, None, None], axis=-1).min(-1)
        fits = (between >= 0.36) & (from_gripper >= 0.25)
        placed = fits.any(1)
        discs[open_rows[placed]] = places[placed, fits.argmax(1)[placed]]
        open_rows, stream = open_rows[~placed], stream + 1
    return State(
        gripper.astype(np.float32),
        discs.astype(np.float32),
        np.full(len(episodes), -1, dtype=np.int64),
        choices[(first[:, 2] * len(choices)).astype(np.int64)],
    )


def step(state: State, action: Floats) -> State:
    """One step of every table: action [n, 3], clipped to [-1, 1]."""
    bounded = np.clip(action, -1.0, 1.0).astype(np.float32)
    gripper = np.clip(state.gripper + REACH * bounded[:, :2], -1.0, 1.0)
    holding = state.held >= 0
    discs = state.discs.copy()
    held_rows = np.flatnonzero(holding)
    discs[held_rows, state.held[held_rows]] += (gripper - state.gripper)[held_rows]
    distance = np.linalg.norm(discs - gripper[:, None], axis=-1)
    nearest = distance.argmin(1)
    taken = np.where(distance.min(1) <= GRASP, nearest, -1)
    held = np.where(bounded[:, 2] > 0, np.where(holding, state.held, taken), -1)
    return State(gripper, discs, held, state.task)


def is_success(state: State) -> Flags:
    """Whether each instruction is fulfilled: the disc let go inside its zone, or the gripper over the disc. [n]."""
    rows = np.arange(len(state.task))
    colour, zone, put = _goal(state.task)
    disc = state.discs[rows, colour]
    inside = np.linalg.norm(disc - ZONE_CENTRES[zone], axis=-1) <= ZONE_RADIUS
    touched = np.linalg.norm(disc - state.gripper, axis=-1) <= GRASP
    fulfilled: Flags = np.where(put, inside & (state.held != colour), touched)
    return fulfilled


def expert(state: State) -> Floats:
    """The scripted action [n, 3]: straight to the disc, close, straight to the zone, open a little inside it."""
    rows = np.arange(len(state.task))
    colour, zone, put = _goal(state.task)
    disc = state.discs[rows, colour]
    carrying = state.held == colour
    way = np.where(carrying[:, None], ZONE_CENTRES[zone] - disc, disc - state.gripper)
    move = way / np.maximum(np.abs(way).max(1, keepdims=True), REACH)
    left = np.linalg.norm(way - REACH * move, axis=-1)
    close = np.where(carrying, left > ZONE_RADIUS - 0.1, left <= 0.8 * GRASP)
    # another disc in hand is let go first, where it is
    wrong = (state.held >= 0) & ~carrying
    grip = np.where(put & close & ~wrong, 1.0, -1.0)
    return np.concatenate([move, grip[:, None]], 1).astype(np.float32)


def expert_chunk(state: State, horizon: int) -> Floats:
    """The next `horizon` actions of the expert from each table, [n, horizon, 3]; still, once it has succeeded."""
    actions = np.zeros((len(state.task), horizon, 3), dtype=np.float32)
    for k in range(horizon):
        now = expert(state)
        done = is_success(state)
        now[done] = (0.0, 0.0, -1.0)
        actions[:, k] = now
        state = step(state, now)
    return actions


def demonstrate(episodes: Keys, tasks: Sequence[int], *, max_steps: int = MAX_STEPS) -> Demonstrations:
    """The expert's episodes. Raises RuntimeError where one does not succeed within max_steps."""
    state = initial_state(episodes, tasks)
    length = np.full(len(episodes), -1, dtype=np.int64)
    states, actions = [], []
    for t in range(max_steps):
        now = expert_chunk(state, 1)[:, 0]
        states.append(state)
        actions.append(now)
        state = step(state, now)
        length[(length < 0) & is_success(state)] = t + 1
        if (length >= 0).all():
            break
    if (length < 0).any():
        raise RuntimeError(
            f"the expert failed in {int((length < 0).sum())} of {len(length)} episodes of {max_steps} steps"
        )
    return Demonstrations(
        np.stack([s.gripper for s in states], 1),
        np.stack([s.discs for s in states], 1),
        np.stack([s.held for s in states], 1),
        states[0].task,
        np.stack(actions, 1),
        length,
    )


def _goal(task: Integers) -> tuple[Integers, Integers, Flags]:
    """Colour, zone (0 where there is none) and whether it is a PUT task."""
    put = task < len(PUT)
    return np.where(put, task // 3, task - len(PUT)), np.where(put, task % 3, 0), put


def _uniform(episodes: Keys, stream: int, count: int) -> NDArray[np.float64]:
    """[n, count] in [0, 1): a function of (episode, stream, place)."""
    start = spread(spread(episodes) + np.uint64(stream))
    bits = spread(start[:, None] + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    # The 53 bits that a double holds.
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
