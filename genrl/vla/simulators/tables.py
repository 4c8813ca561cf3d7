"""Simulators as one vector environment, in this process: `Simulators` over a host (`contract.Host`).

One message per chunk, not per action: a round sends every slot either a chunk or the number of the episode to begin,
and gets one observation back. Which process has a slot does not matter: episodes are functions of (seed, group, number
of the episode), so any number of workers (`workers.FarSimulators`) gives the same rollouts (of environments that are
functions of their seed).

An environment that raises loses its episode alone, and is made anew. Three failures of one slot without an executed
chunk between them are an error, with the report.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.config.plugins import find
from genrl.vla.config.names import SIMULATORS
from genrl.vla.simulators.contract import (
    Ask,
    Description,
    Environment,
    Fault,
    Host,
    Observation,
    Outcome,
    Run,
    Simulation,
    Step,
    episode_keys,
)

ONE_CAMERA = ("minitable", "metaworld", "maniskill", "point_maze", "fetch", "reacher")
OTHER_START = 1_000_003
"""How many starts further one lies that takes the place of one that fails: prime, so that of few goals another is."""
FAILURES = 3
"""So many failures of one slot, with no executed chunk between them, are an error."""


def open_environment(wanted: Simulation) -> Environment:
    """Slots of a simulator by its name; nothing is started before the first reset. Raises ValueError for what does not
    fit together."""
    name, arguments = wanted.name, (wanted.tasks, wanted, dict(wanted.settings))
    if name in ONE_CAMERA and wanted.cameras:
        raise ValueError(
            f"{name} has one camera, observation.image; the policy reads {list(wanted.cameras)}: write policy.rename "
            f"{{observation.image: observation.images.{wanted.cameras[0]}}}, which leaves others empty"
        )
    if wanted.cost_key is not None and name in SIMULATORS.built_in:
        raise ValueError(f"environment.cost_key: {name} knows no costs, gymnasium environments may; leave it out")
    if name in SIMULATORS.built_in:
        described = find(name, SIMULATORS)(*arguments)
    else:
        from genrl.vla.simulators.simulator import describe

        described = describe(name, *arguments)
    if not wanted.workers:
        return Simulators(described, wanted)
    # Here: Ray is an extra, and most runs simulate in this process.
    from genrl.vla.simulators import ray_workers, workers

    if wanted.workers == "ray":
        return workers.FarSimulators(described, wanted, ray_workers.Actor, ray_workers.actors(wanted.ray_actors))
    return workers.FarSimulators(described, wanted, workers.Process, wanted.workers)


class Round:
    """What came of one round in every slot, [B] or [B, C] each; zeros where nothing was done."""

    def __init__(self, num_envs: int, chunk: int) -> None:
        self.rewards, self.costs = np.zeros((2, num_envs, chunk), dtype=np.float32)
        self.n_executed = np.zeros(num_envs, dtype=np.int64)
        flags = np.zeros((4, num_envs), dtype=np.bool_)
        self.terminated, self.truncated, self.success, self.dropped = flags

    def take(self, outcome: Outcome, slots: NDArray[np.int64]) -> None:
        """Write down what came of a chunk."""
        self.rewards[slots], self.n_executed[slots] = outcome.rewards, outcome.n_executed
        self.terminated[slots], self.truncated[slots] = outcome.terminated, outcome.truncated
        self.success[slots] = outcome.success
        if outcome.costs is not None:
            self.costs[slots] = outcome.costs

    def drop(self, slots: Sequence[int]) -> None:
        """Lose the episodes of slots in this round, whatever they have said already."""
        rows = list(slots)
        self.rewards[rows], self.costs[rows], self.n_executed[rows] = 0.0, 0.0, 0
        self.terminated[rows] = self.success[rows] = False
        self.truncated[rows] = self.dropped[rows] = True


class Simulators:
    """A `contract.Environment` over the host of a description, which is made at the first reset.

    Episode k of slot i is a function of (seed, (first_slot + i) // group_size, k). Closed by itself where it raises.
    """

    restarts = 0
    host: Host | None = None

    def __init__(self, description: Description, simulation: Simulation) -> None:
        self.num_envs, self.chunk, self.group_size = simulation.num_envs, simulation.chunk, simulation.group_size
        self.description, self.max_steps, self.in_order = description, description.max_steps, description.in_order
        self.render_size, self.knows_costs = simulation.render_size, simulation.cost_key is not None
        self.waited_s, self.dropped, self.first_slot = 0.0, 0, 0
        self.observation: Observation = {}
        self._instruction = [""] * self.num_envs
        self._action_dim: int | None = None
        self._seed: int | None = None
        self._once = False
        self._count = np.zeros(self.num_envs, dtype=np.int64)
        self._running = np.zeros(self.num_envs, dtype=np.bool_)
        self._vanished = np.zeros(self.num_envs, dtype=np.bool_)  # with a worker, between two rounds
        self._failures = np.zeros(self.num_envs, dtype=np.int64)

    @property
    def task_description(self) -> list[str]:
        """The instruction of each slot."""
        return list(self._instruction)

    @property
    def action_dim(self) -> int:
        """Numbers in an action; a simulator says it when it is there."""
        if self._action_dim is None:
            raise RuntimeError("action_dim is known after the first reset")
        return self._action_dim

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """See `contract.Environment`."""
        options = options or {}
        if set(options) - {"episodes", "once"}:
            raise ValueError(f"the reset options are 'episodes' and 'once', not {sorted(set(options))}")
        self._once = bool(options.get("once"))
        if seed is not None:
            self._seed = seed
            self._count[:] = 0
        elif self._seed is None:
            self._seed = 0
        else:
            self._count += 1
        numbers = self._numbers()
        if "episodes" in options:
            numbers = np.asarray(options["episodes"]).astype(np.uint64)
            fewest = 1 if self._once else self.num_envs
            if numbers.ndim != 1 or not fewest <= len(numbers) <= self.num_envs:
                raise ValueError(f"episodes must be [{self.num_envs}] (fewer with once), got {list(numbers.shape)}")
        self._running[:] = self._vanished[:] = False
        observation, _, _, _, info = self._round(Run(dict(enumerate(numbers.tolist())), {}))
        for slot in range(len(numbers), self.num_envs):
            self._instruction[slot] = self._instruction[0]  # what rests is told nothing that a policy may not know
        return observation, info

    def step(self, actions: NDArray[np.float32], /) -> Step:
        """Execute a chunk [B, C, D] in every slot whose episode goes on; begin the next episode in the others, or, with
        the reset's option "once", leave them as they are."""
        if self._seed is None:
            raise RuntimeError("call reset before step")
        chunks = np.asarray(actions, dtype=np.float32)
        if chunks.shape != (self.num_envs, self.chunk, self.action_dim):
            expected = [self.num_envs, self.chunk, self.action_dim]
            raise ValueError(f"actions must have shape {expected}, got {list(chunks.shape)}")
        if not np.isfinite(chunks[self._running]).all():
            bad = np.flatnonzero(self._running & ~np.isfinite(chunks).all((1, 2)))
            raise ValueError(f"the actions for the slots {bad.tolist()} are not finite: look at the policy")
        ended = ~self._running & ~self._vanished & (not self._once)
        self._count[ended] += 1
        numbers = self._numbers()
        begin = {slot: int(numbers[slot]) for slot in np.flatnonzero(ended).tolist()}
        return self._round(Run(begin, {slot: chunks[slot] for slot in np.flatnonzero(self._running).tolist()}))

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """Pictures of some slots, uint8 [n, render_size, render_size, 3].

        A worker that is lost over it is started again: its pictures are black, its episodes dropped in the next step.
        """
        pictures = np.zeros((len(slots), self.render_size, self.render_size, 3), dtype=np.uint8)
        self._timed_answer(Ask("render", list(slots), self.render_size), pictures)
        return pictures

    def expert_chunks(self, horizon: int) -> NDArray[np.float32]:
        """The expert's next actions in every slot whose episode goes on, [B, horizon, D]; 0 in the others. Nothing
        moves. Raises ValueError where the simulator has no expert.

        A worker that is lost over it is started again: its chunks are 0, its episodes dropped in the next step.
        """
        slots = np.flatnonzero(self._running).tolist()
        advice = np.zeros((len(slots), horizon, self.action_dim), dtype=np.float32)
        self._timed_answer(Ask("advise", slots, horizon), advice)
        chunks = np.zeros((self.num_envs, horizon, self.action_dim), dtype=np.float32)
        chunks[slots] = advice
        return chunks

    def close(self, *, kill: bool = False) -> None:
        """End the simulators; another reset makes them again. kill: without asking."""
        if self.host is not None and not kill:
            self.host.close()
        self.host, self._seed = None, None
        self._running[:] = self._vanished[:] = False

    def _numbers(self) -> NDArray[np.uint64]:
        """The number of each slot's episode, whose task is the number mod tasks: they take turns."""
        assert self._seed is not None
        group, tasks = (self.first_slot + np.arange(self.num_envs)) // self.group_size, self.description.tasks
        numbers = episode_keys(self._seed, group, self._count)
        if tasks == 1:
            return numbers
        turn = (self._seed % tasks + group + self._count) % tasks
        # Halved first, so that adding the task cannot leave 64 bits.
        return (numbers >> np.uint64(1)) // np.uint64(tasks) * np.uint64(tasks) + turn.astype(np.uint64)

    def _round(self, run: Run) -> Step:
        begun, done = time.perf_counter(), Round(self.num_envs, self.chunk)
        try:
            # A worker lost between two rounds (over a picture) took its episodes with it: this is the first round that
            # can say so.
            done.drop(np.flatnonzero(self._vanished).tolist())
            self._play(run, done)
        except BaseException:
            self.close(kill=True)
            raise
        self._vanished[:] = False
        moved = np.isin(np.arange(self.num_envs), [*run.begin, *run.chunks])  # others rest: nothing ends in them again
        self._running = moved & ~(done.terminated | done.truncated)
        self.dropped += int(done.dropped.sum())
        self.waited_s += time.perf_counter() - begun
        names = {"rewards": "rewards", "n_executed": "n_executed", "is_success": "success", "dropped": "dropped"}
        names |= {"costs": "costs"} if self.knows_costs else {}
        info = {name: getattr(done, field) for name, field in names.items()}
        # A copy: the next round writes into the same arrays, and rollouts keep what they were shown.
        observation = {name: value.copy() for name, value in self.observation.items()}
        return observation, done.rewards.sum(1), done.terminated, done.truncated, info

    def _play(self, run: Run, done: Round) -> None:
        """Do a round; in place of an episode that cannot begin another one is begun, by a new environment."""
        if self.host is None:
            self.host = self.description.host(self.num_envs)
        while run.begin or run.chunks:
            restarted: dict[int, int] = {}
            for message in self.host.run(run):
                if isinstance(message, Outcome):
                    self._take(message, message.slots, done)
                    continue
                assert isinstance(message, Fault)
                self._blame(message, message.slot)
                if message.slot in run.begin:
                    restarted[message.slot] = self._another(run.begin[message.slot])
                else:
                    done.drop([message.slot])
            run = Run(restarted, {})

    def _timed_answer(self, ask: Ask, answer: NDArray[np.generic]) -> None:
        """Write what the slots answer into an array, a row each."""
        begun = time.perf_counter()
        try:
            if ask.slots:
                self._answer(ask, answer)
        except BaseException:
            self.close(kill=True)
            raise
        self.waited_s += time.perf_counter() - begun

    def _answer(self, ask: Ask, answer: NDArray[np.generic]) -> None:
        if self.host is None:
            self.host = self.description.host(self.num_envs)
        answer[:] = getattr(self.host, ask.what)(ask.slots, ask.number)

    def _take(self, outcome: Outcome, slots: NDArray[np.int64], done: Round) -> None:
        """Write an outcome down, of slots by their numbers among all. Raises ValueError where it is of another kind."""
        for slot, line in zip(slots.tolist(), outcome.instruction, strict=True):
            self._instruction[slot] = line
        which = f"of slot {slots[0]} ({outcome.instruction[0]!r})"
        for name, value in outcome.observation.items():
            if name not in self.observation:
                self.observation[name] = np.zeros((self.num_envs, *value.shape[1:]), dtype=value.dtype)
            others = self.observation[name].shape[1:]
            if others != value.shape[1:]:
                raise ValueError(
                    f"{name} {which} is {list(value.shape[1:])}, that of others {list(others)}: all tasks of a run "
                    "must show the same"
                )
            self.observation[name][slots] = value
        if self._action_dim not in (None, outcome.action_dim):
            raise ValueError(
                f"actions {which} have {outcome.action_dim} numbers, those of others {self._action_dim}: all tasks of "
                "a run must have the same"
            )
        if not np.isfinite(outcome.rewards).all():
            raise ValueError(f"a reward {which} is not finite: {outcome.rewards[0].tolist()}; look at the simulator")
        self._action_dim = outcome.action_dim
        done.take(outcome, slots)
        # Only an executed chunk clears it: a simulator that begins and then dies each time would go on for ever.
        self._failures[slots[outcome.n_executed > 0]] = 0

    def _another(self, number: int) -> int:
        """The episode of the same task in place of one whose start fails, which would fail again: the same one in all
        slots of a group."""
        further = number + OTHER_START * self.description.tasks
        return further if further < 2**64 else number - OTHER_START * self.description.tasks

    def _blame(self, fault: Fault, slot: int) -> None:
        """Count a failure of a slot, by its number among all. Raises where that is enough."""
        if fault.misuse:
            raise ValueError(fault.report)
        self._failures[slot] += 1
        if self._failures[slot] >= FAILURES:
            raise RuntimeError(
                f"the simulator of slot {slot} failed {FAILURES} times without executing a chunk; the last time:\n"
                f"{fault.report}"
            )
