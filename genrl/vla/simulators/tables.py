"""Simulators over workers as one vector environment; workers that die, hang or raise are restarted and counted.

One message per chunk, not per action: a round sends every slot either a chunk or the number of the episode to begin,
and gets one observation back. Which process has a slot does not matter: episodes are functions of (seed, group, number
of the episode), so any number of workers gives the same rollouts (of environments that are functions of their seed).

What can fail: a worker's process ends; a worker sends nothing for too long, and is killed; an environment raises. In
the first two the worker is started again and the running episodes of all its slots are dropped; in the last one only
that of the slot, whose environment is made anew. The slot that was being worked on is to blame: three failures of one
slot without an executed chunk between them are an error, with the worker's report.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.vla.simulators.contract import (
    Advice,
    Ask,
    Description,
    Fault,
    Frames,
    Observation,
    Outcome,
    Render,
    Run,
    Simulation,
    Step,
    episode_keys,
)
from genrl.vla.simulators.crew import Crew, Link
from genrl.vla.simulators.workers import Worker, WorkerLost

FAILURES = 3
"""So many failures of one slot, with no executed chunk between them, are an error."""


class Simulators:
    """A `contract.Environment` over workers, which `worker` makes for so many slots of a description.

    Episode k of slot i is a function of (seed, (first_slot + i) // group_size, k). Closed by itself where it raises.
    """

    def __init__(
        self,
        description: Description,
        simulation: Simulation,
        worker: Callable[[Description, int], Worker],
        workers: int = 1,
    ) -> None:
        self.num_envs, self.chunk, self.group_size = simulation.num_envs, simulation.chunk, simulation.group_size
        self.tasks, self.max_steps = description.tasks, description.max_steps
        self.render_size, self.knows_costs = simulation.render_size, simulation.cost_key is not None
        self.waited_s, self.dropped, self.first_slot = 0.0, 0, 0
        times = {"timeout_s": simulation.timeout_s, "start_timeout_s": simulation.start_timeout_s}
        self.crew = Crew(description, worker, workers, self.num_envs, **times)
        self._most_bytes = 1e9 * simulation.worker_gb
        self._seed: int | None = None
        self._count = np.zeros(self.num_envs, dtype=np.int64)
        self._running = np.zeros(self.num_envs, dtype=np.bool_)
        self._vanished = np.zeros(self.num_envs, dtype=np.bool_)  # with a worker, between two rounds
        self._failures = np.zeros(self.num_envs, dtype=np.int64)
        self._shown = _Shown(self.num_envs)

    @property
    def task_description(self) -> list[str]:
        """The instruction of each slot."""
        return list(self._shown.instruction)

    @property
    def action_dim(self) -> int:
        """Numbers in an action; a simulator says it when it is there."""
        if self._shown.action_dim is None:
            raise RuntimeError("action_dim is known after the first reset")
        return self._shown.action_dim

    @property
    def restarts(self) -> int:
        """Workers that had to be started again."""
        return self.crew.restarts

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """See `contract.Tables`."""
        options = options or {}
        if set(options) - {"episodes"}:
            raise ValueError(f"the reset option is 'episodes', not {sorted(set(options) - {'episodes'})}")
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
            if numbers.shape != (self.num_envs,):
                raise ValueError(f"episodes must be [{self.num_envs}], got {list(numbers.shape)}")
        self._running[:] = self._vanished[:] = False
        if self._most_bytes < math.inf:  # else nobody looks through the processes of this machine for it
            self.crew.renew(self._most_bytes)
        observation, _, _, _, info = self._round({slot: int(number) for slot, number in enumerate(numbers)}, {})
        return observation, info

    def step(self, actions: NDArray[np.float32], /) -> Step:
        """Execute a chunk [B, C, D] in every slot whose episode goes on; begin the next episode in the others."""
        if self._seed is None:
            raise RuntimeError("call reset before step")
        chunks = np.asarray(actions, dtype=np.float32)
        if chunks.shape != (self.num_envs, self.chunk, self.action_dim):
            expected = [self.num_envs, self.chunk, self.action_dim]
            raise ValueError(f"actions must have shape {expected}, got {list(chunks.shape)}")
        if not np.isfinite(chunks[self._running]).all():
            bad = np.flatnonzero(self._running & ~np.isfinite(chunks).all((1, 2)))
            raise ValueError(f"the actions for the slots {bad.tolist()} are not finite: look at the policy")
        self._count[~self._running & ~self._vanished] += 1
        numbers = self._numbers()
        slots = range(self.num_envs)
        begin = {slot: int(numbers[slot]) for slot in slots if not self._running[slot] and not self._vanished[slot]}
        return self._round(begin, {slot: chunks[slot] for slot in slots if self._running[slot]})

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """Pictures of some slots, uint8 [n, render_size, render_size, 3].

        A worker that is lost over it is started again: its pictures are black, its episodes dropped in the next step.
        """
        pictures = np.zeros((len(slots), self.render_size, self.render_size, 3), dtype=np.uint8)
        self._tell(slots, lambda own: Render(own, self.render_size), pictures)
        return pictures

    def expert_chunks(self, horizon: int) -> NDArray[np.float32]:
        """See `contract.Advised`. A worker that is lost over it is started again: its chunks are 0, its episodes
        dropped in the next step."""
        slots = np.flatnonzero(self._running).tolist()
        told = np.zeros((len(slots), horizon, self.action_dim), dtype=np.float32)
        self._tell(slots, lambda own: Ask(own, horizon), told)
        chunks = np.zeros((self.num_envs, horizon, self.action_dim), dtype=np.float32)
        chunks[slots] = told
        return chunks

    def _tell(
        self, slots: Sequence[int], work: Callable[[list[int]], Render | Ask], found: NDArray[np.generic]
    ) -> None:
        """Ask every worker for something of its slots, by their numbers there, and write it into found [n, ...]."""
        self.crew.start()
        begun = time.perf_counter()
        asked: dict[Link, list[int]] = {}
        for link in self.crew.links:
            rows = [row for row, slot in enumerate(slots) if slot in link.slots]
            if rows:
                asked[link] = rows
                self.crew.send(link, work([slots[row] - link.slots.start for row in rows]), [])
        try:
            while asked:
                link, message = self.crew.next(asked)
                if link not in asked:
                    continue
                if isinstance(message, Frames | Advice):
                    found[asked.pop(link)] = message[0]
                elif isinstance(message, WorkerLost):
                    del asked[link]
                    self.crew.restart(link)
                    self._vanished[link.slots] = self._running[link.slots]
                    self._running[link.slots] = False
                else:
                    assert isinstance(message, Fault)
                    raise (ValueError if message.misuse else RuntimeError)(message.report)
        except BaseException:
            self.close(kill=True)
            raise
        self.waited_s += time.perf_counter() - begun

    def close(self, *, kill: bool = False) -> None:
        """End all workers; another reset starts them again."""
        self.crew.end(kill=kill)
        self._seed = None
        self._running[:] = self._vanished[:] = False

    def _numbers(self) -> NDArray[np.uint64]:
        """The number of each slot's episode, whose task is the number mod tasks: they take turns."""
        assert self._seed is not None
        group = (self.first_slot + np.arange(self.num_envs)) // self.group_size
        numbers = episode_keys(self._seed, group, self._count)
        if self.tasks == 1:
            return numbers
        turn = (self._seed % self.tasks + group + self._count) % self.tasks
        size = np.uint64(self.tasks)
        return (numbers >> np.uint64(1)) // size * size + turn.astype(np.uint64)

    def _round(self, begin: dict[int, int], chunks: dict[int, NDArray[np.float32]]) -> Step:
        begun = time.perf_counter()
        told = _Round(self.crew, self._shown, self._failures, self.chunk, begin, chunks)
        try:
            self.crew.start()
            told.play(self._vanished)
        except BaseException:
            self.close(kill=True)
            raise
        self._vanished[:] = False
        self._running = ~(told.terminated | told.truncated)
        self.dropped += int(told.dropped.sum())
        self.waited_s += time.perf_counter() - begun
        info = {
            "rewards": told.rewards,
            "n_executed": told.n_executed,
            "is_success": told.success,
            "dropped": told.dropped,
        }
        if self.knows_costs:
            info["costs"] = told.costs
        seen = {name: value.copy() for name, value in self._shown.observation.items()}
        return seen, told.rewards.sum(1), told.terminated, told.truncated, info


class _Shown:
    """What every slot shows, by its newest outcome."""

    def __init__(self, num_envs: int) -> None:
        self.observation: Observation = {}
        self.instruction = [""] * num_envs
        self.action_dim: int | None = None

    def take(self, outcome: Outcome, slots: NDArray[np.int64]) -> None:
        """Write an outcome down, of slots by their numbers among all. Raises ValueError where it is of another kind."""
        for slot, line in zip(slots.tolist(), outcome.instruction, strict=True):
            self.instruction[slot] = line
        of = f"of slot {slots[0]} ({outcome.instruction[0]!r})"
        for name, value in outcome.observation.items():
            if name not in self.observation:
                self.observation[name] = np.zeros((len(self.instruction), *value.shape[1:]), dtype=value.dtype)
            own = self.observation[name].shape[1:]
            if own != value.shape[1:]:
                raise ValueError(
                    f"{name} {of} is {list(value.shape[1:])}, that of others {list(own)}: all tasks of a run must show "
                    "the same"
                )
            self.observation[name][slots] = value
        if self.action_dim not in (None, outcome.action_dim):
            raise ValueError(
                f"actions {of} have {outcome.action_dim} numbers, those of others {self.action_dim}: all tasks of a "
                "run must have the same"
            )
        self.action_dim = outcome.action_dim


class _Round:
    """One round: `begin` slot -> episode, `chunks` slot -> [C, D], and what is told of every slot."""

    def __init__(
        self,
        crew: Crew,
        shown: _Shown,
        failures: NDArray[np.int64],
        chunk: int,
        begin: dict[int, int],
        chunks: dict[int, NDArray[np.float32]],
    ) -> None:
        self.crew, self.shown, self.failures = crew, shown, failures
        self.begin, self.chunks = begin, chunks
        self.rewards, self.costs = np.zeros((2, len(failures), chunk), dtype=np.float32)
        self.n_executed = np.zeros(len(failures), dtype=np.int64)
        flags = np.zeros((4, len(failures)), dtype=np.bool_)
        self.terminated, self.truncated, self.success, self.dropped = flags

    def play(self, vanished: NDArray[np.bool_]) -> None:
        """Send every worker its part and wait for all that they tell. vanished: slots whose episode is lost already."""
        for slot in np.flatnonzero(vanished):
            self._drop(int(slot))
        for link in self.crew.links:
            self._order(link, [slot for slot in link.slots if slot in self.begin], self.chunks)
        while waiting := [link for link in self.crew.links if link.open]:
            link, message = self.crew.next(waiting)
            if link not in self.crew.links:
                continue  # of a worker that is gone
            if isinstance(message, Outcome):
                self._take(link, message)
            elif isinstance(message, Fault):
                self._fault(link, message)
            elif isinstance(message, WorkerLost):
                self._lost(link, message)

    def _order(self, link: Link, begins: list[int], chunks: dict[int, NDArray[np.float32]]) -> None:
        """Send a worker its part of a round: these episodes to begin, and its chunks."""
        first = link.slots.start
        own = {slot: chunks[slot] for slot in link.slots if slot in chunks}
        slots = sorted([*begins, *own])
        if slots:
            run = Run({s - first: self.begin[s] for s in begins}, {s - first: chunk for s, chunk in own.items()})
            self.crew.send(link, run, slots)
            self._expect(link)

    def _expect(self, link: Link) -> None:
        if link.open:
            self.crew.expect(link, starting=link.open[0] in self.begin)

    def _take(self, link: Link, outcome: Outcome) -> None:
        slots = outcome.slots + link.slots.start
        link.open = [slot for slot in link.open if slot not in slots.tolist()]
        self.shown.take(outcome, slots)
        self.rewards[slots], self.n_executed[slots] = outcome.rewards, outcome.n_executed
        self.terminated[slots], self.truncated[slots] = outcome.terminated, outcome.truncated
        self.success[slots] = outcome.success
        if outcome.costs is not None:
            self.costs[slots] = outcome.costs
        self.failures[slots[outcome.n_executed > 0]] = 0
        self._expect(link)

    def _drop(self, slot: int) -> None:
        """The episode of a slot is lost in this round, whatever it has said already."""
        self.rewards[slot], self.costs[slot], self.n_executed[slot] = 0.0, 0.0, 0
        self.terminated[slot] = self.success[slot] = False
        self.truncated[slot] = self.dropped[slot] = True

    def _fault(self, link: Link, fault: Fault) -> None:
        """An environment raised; its worker goes on."""
        if fault.misuse:
            raise ValueError(fault.report)
        if fault.slot < 0:
            link.report = fault.report  # and it ends, which is told next
            return
        slot = fault.slot + link.slots.start
        link.open.remove(slot)
        self._blame(slot, fault.report)
        if slot in self.begin:
            self._order(link, [slot], {})
        else:
            self._drop(slot)
        self._expect(link)

    def _lost(self, link: Link, lost: WorkerLost) -> None:
        """A worker is gone: what it was to begin is begun again, and what it ran is dropped, unless it had ended."""
        if link.open:
            self._blame(link.open[0], f"{lost}\n{link.report}")
        again = self.crew.restart(link)
        for slot in link.slots:
            over = slot not in link.open and bool(self.terminated[slot] or self.truncated[slot])
            if slot in self.chunks and not over:
                self._drop(slot)
        self._order(again, [slot for slot in link.slots if slot in self.begin], {})

    def _blame(self, slot: int, why: str) -> None:
        self.failures[slot] += 1
        if self.failures[slot] >= FAILURES:
            raise RuntimeError(
                f"the simulator of slot {slot} failed {FAILURES} times without executing a chunk; the last time:\n{why}"
            )
