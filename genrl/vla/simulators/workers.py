"""Simulators dealt over worker processes, as vectorised tables; what dies, hangs or raises is begun anew and counted.

One message per chunk, not per action: a round sends every slot either a chunk or the number of the episode to begin,
and gets one observation back. Which process has a slot does not matter: episodes are functions of (seed, group, number
of the episode), so any number of workers gives the same rollouts (of environments that are functions of their seed).

What can fail: a worker's process ends; a worker sends nothing for too long, and is killed; an environment raises. In
the first two the worker is started again and the running episodes of all its slots are dropped; in the last one only
that of the slot, whose environment is made anew. The slot that was being worked on is to blame: three failures of one
slot without an executed chunk between them are an error, with the worker's report.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from genrl.vla.simulators.minitable.task import episode_keys
from genrl.vla.simulators.simulator import (
    Description,
    Draw,
    Fault,
    Frames,
    Host,
    Message,
    Misuse,
    Observation,
    Outcome,
    Run,
)

FAILURES = 3
"""So many failures of one slot, with no executed chunk between them, are an error."""


class Lost(Exception):
    """A worker that is no more; says why."""


class Worker(Protocol):
    """Where a host runs."""

    inline: bool
    """Work is done where it is asked for; otherwise in a thread that waits for it."""

    def start(self) -> None: ...

    def do(self, work: Run | Draw) -> Iterator[Message]:
        """Messages as they come. Raises Lost."""
        ...

    def kill(self) -> None:
        """At once, whatever it does."""
        ...

    def close(self) -> None:
        """Close the environments, and end."""
        ...


class Inline:
    """The host in this process: no protection against what hangs or dies, and none of its cost."""

    inline = True

    def __init__(self, description: Description, slots: int) -> None:
        self.description, self.slots = description, slots
        self.host: Host | None = None

    def start(self) -> None:
        """Make the host; its environments are made when they are needed."""
        self.host = self.description.host(self.slots)

    def do(self, work: Run | Draw) -> Iterator[Message]:
        """See `Worker`."""
        assert self.host is not None
        return done(self.host, work)

    def kill(self) -> None:
        """Let go of the environments."""
        self.host = None

    def close(self) -> None:
        """See `Worker`."""
        if self.host is not None:
            self.host.close()
        self.host = None


class Process:
    """The host in a process of its own, spawned: a fork of a process with a graphics context hangs."""

    inline = False

    def __init__(self, description: Description, slots: int) -> None:
        self.description, self.slots = description, slots

    def start(self) -> None:
        """Start the process; it makes its host by itself."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.description, self.slots), daemon=True)
        self.process.start()
        theirs.close()

    def do(self, work: Run | Draw) -> Iterator[Message]:
        """See `Worker`. A process that has ended is seen by its sentinel: its children may hold the pipe open."""
        connection, process = self.connection, self.process
        try:
            connection.send(work)
            while True:
                wait([connection, process.sentinel])
                if not connection.poll():
                    break
                message = connection.recv()
                if message is None:
                    return
                yield message
        except (EOFError, OSError):
            pass  # it has ended
        process.join(5.0)
        raise Lost(f"its process {process.pid} ended with exit code {process.exitcode}")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Ask, and wait for five seconds."""
        try:
            self.connection.send(None)
            self.process.join(5.0)
        except OSError:
            pass  # it has ended already
        self.kill()


def _serve(connection: Connection, description: Description, slots: int) -> None:
    """The life of a process: after the messages of each piece of work comes None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other side, which closes this one
    try:
        host = description.host(slots)
        while (work := connection.recv()) is not None:
            for message in done(host, work):
                connection.send(message)
            connection.send(None)
        host.close()
    except (EOFError, BrokenPipeError):
        os._exit(1)  # the other side is gone; a simulator that hangs in its end must not keep this process
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side is told, and judges
        connection.send(report(error, -1))


def report(error: Exception, slot: int) -> Fault:
    """What the other side is told of an exception."""
    misuse = isinstance(error, (Misuse, ModuleNotFoundError))
    return Fault(slot, str(error) if misuse else "".join(traceback.format_exception(error)), misuse)


def done(host: Host, work: Run | Draw) -> Iterator[Message]:
    """Do a piece of work: its messages."""
    return host.run(work) if isinstance(work, Run) else iter([host.draw(work)])


class _Link:
    """A worker and the thread that waits for it; what it says goes into `inbox` with this link, None when it is done.

    A new link for a worker that is started again: what the old one had still to say is not taken for the new one's.
    """

    def __init__(self, worker: Worker, slots: range, inbox: queue.SimpleQueue[tuple[_Link, Message | Lost]]) -> None:
        self.worker, self.slots, self.inbox = worker, slots, inbox
        self.open: list[int] = []  # slots that are to report, in the order of the work
        self.deadline = 0.0
        self.report = ""
        worker.start()
        self._outbox: queue.SimpleQueue[Run | Draw | None] = queue.SimpleQueue()
        if not worker.inline:
            threading.Thread(target=self._wait, daemon=True).start()

    def send(self, work: Run | Draw) -> None:
        """Never blocks, unless the worker is inline."""
        if self.worker.inline:
            self._do(work)
        else:
            self._outbox.put(work)

    def end(self, *, kill: bool) -> None:
        self._outbox.put(None)
        if kill:
            self.worker.kill()
        else:
            self.worker.close()

    def _wait(self) -> None:
        while (work := self._outbox.get()) is not None:
            self._do(work)

    def _do(self, work: Run | Draw) -> None:
        try:
            for message in self.worker.do(work):
                self.inbox.put((self, message))
        except Lost as lost:
            self.inbox.put((self, lost))
        except Exception as error:  # noqa: BLE001 - in a thread: the round is told, and judges
            if self.worker.inline:
                raise
            self.inbox.put((self, Lost(report(error, -1).report)))


class Simulators:
    """`environments.Environment` over workers; the contract stands there, next-step auto-reset as in `MiniTable`.

    worker: makes one of so many slots of a description. tasks: how many its episodes have; they take turns over slots
    and episodes. max_steps: the limit that the description says, for who must know it. start_timeout_s is for a chunk
    that begins an episode, for which a simulator may have to be made. first_slot: the number of slot 0, where there are
    more elsewhere; episodes are functions of it.
    Closed by itself where it raises.
    """

    def __init__(
        self,
        description: Description,
        worker: Callable[[Description, int], Worker],
        *,
        workers: int,
        num_envs: int,
        chunk: int,
        group_size: int = 1,
        tasks: int = 1,
        max_steps: int | None = None,
        render_size: int = 128,
        timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        if min(num_envs, chunk, group_size, workers) < 1 or num_envs % group_size:
            raise ValueError(
                "num_envs, chunk, group_size and the number of workers must be positive and groups complete; got "
                f"{num_envs}, {chunk}, {group_size} and {workers}"
            )
        if min(timeout_s, start_timeout_s) <= 0:
            raise ValueError(f"timeouts are positive seconds, got {timeout_s} and {start_timeout_s}")
        self.num_envs, self.chunk, self.group_size, self.tasks = num_envs, chunk, group_size, tasks
        self.max_steps, self.render_size = max_steps, render_size
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.waited_s, self.dropped, self.restarts = 0.0, 0, 0
        self.first_slot = 0
        bounds = [num_envs * w // workers for w in range(workers + 1)]
        self._parts = [range(*pair) for pair in zip(bounds, bounds[1:], strict=False) if pair[0] < pair[1]]
        self._workers = [worker(description, len(part)) for part in self._parts]
        self._inbox: queue.SimpleQueue[tuple[_Link, Message | Lost]] = queue.SimpleQueue()
        self._links: list[_Link] = []
        self._seed: int | None = None
        self._count = np.zeros(num_envs, dtype=np.int64)
        self._running = np.zeros(num_envs, dtype=np.bool_)
        self._vanished = np.zeros(num_envs, dtype=np.bool_)  # with a worker, between two rounds
        self._failures = np.zeros(num_envs, dtype=np.int64)
        self._seen: Observation = {}
        self._instruction = [""] * num_envs
        self._action_dim: int | None = None

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
        """Begin an episode in every slot: episode 0 of a seed, or without one the next.

        options["episodes"]: uint64 [B], the numbers of the episodes instead; those after them are the seed's.
        """
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
        observation, _, _, _, info = self._round({slot: int(number) for slot, number in enumerate(numbers)}, {})
        return observation, info

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
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
        self._start()
        begun = time.perf_counter()
        pictures = np.zeros((len(slots), self.render_size, self.render_size, 3), dtype=np.uint8)
        asked: dict[_Link, list[int]] = {}
        for link in self._links:
            rows = [row for row, slot in enumerate(slots) if slot in link.slots]
            if rows:
                asked[link] = rows
                self._send(link, Draw([slots[row] - link.slots.start for row in rows], self.render_size), [])
        try:
            while asked:
                link, message = self._next(asked)
                if link not in asked:
                    continue
                if isinstance(message, Frames):
                    pictures[asked.pop(link)] = message.pictures
                elif isinstance(message, Lost):
                    del asked[link]
                    self._again(link)
                    self._vanished[link.slots] = self._running[link.slots]
                    self._running[link.slots] = False
                else:
                    assert isinstance(message, Fault)
                    raise (ValueError if message.misuse else RuntimeError)(message.report)
        except BaseException:
            self.close(kill=True)
            raise
        self.waited_s += time.perf_counter() - begun
        return pictures

    def close(self, *, kill: bool = False) -> None:
        """End all workers; another reset starts them again."""
        links, self._links = self._links, []
        for link in links:
            link.end(kill=kill)
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

    def _start(self) -> None:
        if not self._links:
            parts = zip(self._workers, self._parts, strict=True)
            self._links = [_Link(worker, part, self._inbox) for worker, part in parts]

    def _send(self, link: _Link, work: Run | Draw, slots: list[int]) -> None:
        if not link.open:
            self._expect(link, isinstance(work, Run) and not work.chunks)
        link.open += slots
        link.send(work)

    def _expect(self, link: _Link, starting: bool) -> None:
        """Begin to wait for the next message of a worker."""
        link.deadline = time.monotonic() + (self.start_timeout_s if starting else self.timeout_s)

    def _next(self, links: Any) -> tuple[_Link, Message | Lost]:
        """The next message of any worker; Lost for one that is too late, which is killed. Stale ones too: look."""
        soonest: _Link = min(links, key=lambda link: link.deadline)
        try:
            return self._inbox.get(timeout=max(0.0, soonest.deadline - time.monotonic()))
        except queue.Empty:
            soonest.worker.kill()
            return soonest, Lost("it was killed, having sent nothing for the time that is allowed (timeout)")

    def _again(self, link: _Link) -> _Link:
        """A new link instead of one whose worker is gone."""
        link.end(kill=True)
        self.restarts += 1
        again = _Link(link.worker, link.slots, self._inbox)
        self._links[self._links.index(link)] = again
        return again

    def _round(
        self, begin: dict[int, int], chunks: dict[int, NDArray[np.float32]]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        begun = time.perf_counter()
        told = _Told(self.num_envs, self.chunk)
        try:
            self._start()
            for slot in np.flatnonzero(self._vanished):
                self._drop(int(slot), told)
            self._vanished[:] = False
            for link in self._links:
                self._order(link, [s for s in link.slots if s in begin], begin, chunks)
            while waiting := [link for link in self._links if link.open]:
                link, message = self._next(waiting)
                if link not in self._links:
                    continue  # of a worker that is gone
                if isinstance(message, Outcome):
                    self._take(link, message, told)
                    if link.open:
                        self._expect(link, link.open[0] in begin)
                elif isinstance(message, Fault):
                    self._fault(link, message, begin, told)
                elif isinstance(message, Lost):
                    self._lost(link, message, begin, chunks, told)
        except BaseException:
            self.close(kill=True)
            raise
        self._running = ~(told.terminated | told.truncated)
        self.dropped += int(told.dropped.sum())
        self.waited_s += time.perf_counter() - begun
        info = {
            "rewards": told.rewards,
            "n_executed": told.n_executed,
            "is_success": told.success,
            "dropped": told.dropped,
        }
        seen = {name: value.copy() for name, value in self._seen.items()}
        return seen, told.rewards.sum(1), told.terminated, told.truncated, info

    def _order(
        self, link: _Link, begins: list[int], begin: dict[int, int], chunks: dict[int, NDArray[np.float32]]
    ) -> None:
        """Send a worker its part of a round: these episodes to begin, and its chunks."""
        first = link.slots.start
        own = {slot: chunks[slot] for slot in link.slots if slot in chunks}
        slots = sorted([*begins, *own])
        if slots:
            run = Run({s - first: begin[s] for s in begins}, {s - first: chunk for s, chunk in own.items()})
            self._send(link, run, slots)
            self._expect(link, link.open[0] in begin)

    def _take(self, link: _Link, outcome: Outcome, told: _Told) -> None:
        """Write an outcome down."""
        slots = outcome.slots + link.slots.start
        said = dict(zip(slots.tolist(), outcome.instruction, strict=True))
        link.open = [slot for slot in link.open if slot not in said]
        for slot, line in said.items():
            self._instruction[slot] = line
        for name, value in outcome.observation.items():
            if name not in self._seen:
                self._seen[name] = np.zeros((self.num_envs, *value.shape[1:]), dtype=value.dtype)
            if self._seen[name].shape[1:] != value.shape[1:]:
                raise ValueError(
                    f"{name} of slot {slots[0]} ({outcome.instruction[0]!r}) is {list(value.shape[1:])}, that of "
                    f"others {list(self._seen[name].shape[1:])}: all tasks of a run must show the same"
                )
            self._seen[name][slots] = value
        if self._action_dim not in (None, outcome.action_dim):
            raise ValueError(
                f"actions of slot {slots[0]} ({outcome.instruction[0]!r}) have {outcome.action_dim} numbers, those of "
                f"others {self._action_dim}: all tasks of a run must have the same"
            )
        self._action_dim = outcome.action_dim
        told.rewards[slots], told.n_executed[slots] = outcome.rewards, outcome.n_executed
        told.terminated[slots], told.truncated[slots] = outcome.terminated, outcome.truncated
        told.success[slots] = outcome.success
        self._failures[slots[outcome.n_executed > 0]] = 0

    def _drop(self, slot: int, told: _Told) -> None:
        """The episode of a slot is lost in this round, whatever it has said already."""
        told.rewards[slot], told.n_executed[slot] = 0.0, 0
        told.terminated[slot] = told.success[slot] = False
        told.truncated[slot] = told.dropped[slot] = True

    def _fault(self, link: _Link, fault: Fault, begin: dict[int, int], told: _Told) -> None:
        """An environment raised; its worker goes on."""
        if fault.misuse:
            raise ValueError(fault.report)
        if fault.slot < 0:
            link.report = fault.report  # and it ends, which is told next
            return
        slot = fault.slot + link.slots.start
        link.open.remove(slot)
        self._blame(slot, fault.report)
        if slot in begin:
            self._order(link, [slot], begin, {})
        else:
            self._drop(slot, told)
        if link.open:
            self._expect(link, link.open[0] in begin)

    def _lost(
        self, link: _Link, lost: Lost, begin: dict[int, int], chunks: dict[int, NDArray[np.float32]], told: _Told
    ) -> None:
        """A worker is gone: what it was to begin is begun again, and what it ran is dropped, unless it had ended."""
        if link.open:
            self._blame(link.open[0], f"{lost}\n{link.report}")
        again = self._again(link)
        for slot in link.slots:
            over = slot not in link.open and bool(told.terminated[slot] or told.truncated[slot])
            if slot in chunks and not over:
                self._drop(slot, told)
        self._order(again, [slot for slot in link.slots if slot in begin], begin, {})

    def _blame(self, slot: int, why: str) -> None:
        self._failures[slot] += 1
        if self._failures[slot] >= FAILURES:
            raise RuntimeError(
                f"the simulator of slot {slot} failed {FAILURES} times without executing a chunk; the last time:\n{why}"
            )


class _Told:
    """What a round tells of every slot."""

    def __init__(self, num_envs: int, chunk: int) -> None:
        self.rewards = np.zeros((num_envs, chunk), dtype=np.float32)
        self.n_executed = np.zeros(num_envs, dtype=np.int64)
        flags = np.zeros((4, num_envs), dtype=np.bool_)
        self.terminated, self.truncated, self.success, self.dropped = flags
