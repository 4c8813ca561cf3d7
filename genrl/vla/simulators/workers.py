"""Simulators in processes of their own, and what is done where these die or hang. On Ray actors: `ray_workers`.

A worker's process may end, or send nothing for too long, and is then killed: it is started again, and the running
episodes of all its slots are dropped. The slot that was being worked on is to blame (`tables.FAILURES`).
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.vla.simulators.contract import Ask, Description, Fault, Host, Message, Misuse, Outcome, Run, Simulation
from genrl.vla.simulators.tables import Round, Simulators

Work = Any
"""`contract.Run` or `Ask`; or what another kind of host is asked for, which answers as it likes."""
Inbox = queue.SimpleQueue[tuple["Worker", Any]]


class WorkerLost(Exception):
    """A worker has ended or does not answer; says why."""


class Worker(ABC):
    """The host of some neighbouring slots elsewhere, and the thread that waits for it: what it says goes into `inbox`
    with this worker.

    One that is lost gets a successor, another object: what the old one had still to say is not taken for the new one's.
    """

    def __init__(self, description: Description, slots: range, inbox: Inbox) -> None:
        self.description, self.slots, self.inbox = description, slots, inbox
        self.open: list[int] = []
        """Slots that are to report, in the order of the work."""
        self.deadline = 0.0
        self.report = ""
        self.start()
        self._outbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        threading.Thread(target=self._wait, daemon=True).start()

    @abstractmethod
    def start(self) -> None:
        """Make the place where the host is."""

    @abstractmethod
    def do(self, work: Work) -> Iterator[Message]:
        """Messages as they come. Raises WorkerLost."""

    @abstractmethod
    def kill(self) -> None:
        """End at once, whatever it does."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments, and end."""

    def send(self, work: Work) -> None:
        """Give it something to do; never blocks."""
        self._outbox.put(work)

    def end(self, *, kill: bool) -> None:
        self._outbox.put(None)
        if kill:
            self.kill()
        else:
            self.close()

    def _wait(self) -> None:
        while (work := self._outbox.get()) is not None:
            try:
                for message in self.do(work):
                    self.inbox.put((self, message))
            except WorkerLost as lost:
                self.inbox.put((self, lost))
            except Exception as error:  # noqa: BLE001 - in a thread: the round is told, and judges
                self.inbox.put((self, WorkerLost(report(error).report)))


class Process(Worker):
    """The host in a process of its own, spawned: a fork of a process with a graphics context hangs."""

    def start(self) -> None:
        """Start the process; it makes its host by itself."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, self.description, len(self.slots))
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        # Its end is the child's alone: held open here too, the pipe would never say that the child has ended.
        theirs.close()

    def do(self, work: Work) -> Iterator[Message]:
        """See `Worker`. A process that has ended is seen by its sentinel: its children may hold the pipe open."""
        connection, process = self.connection, self.process
        try:
            connection.send(work)
            while True:
                # On both: a killed process says nothing, and one that has spoken may have ended since.
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
        raise WorkerLost(f"its process {process.pid} ended with exit code {process.exitcode}")

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
            for message in messages(host, work):
                connection.send(message)
            connection.send(None)
        host.close()
    except (EOFError, BrokenPipeError):
        os._exit(1)  # the other side is gone; a simulator that hangs in its end must not keep this process
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side is told, and judges
        connection.send(report(error))


def report(error: Exception) -> Fault:
    """What the other side is told of an exception of a whole host."""
    misuse = isinstance(error, (Misuse, ModuleNotFoundError))
    return Fault(-1, str(error) if misuse else "".join(traceback.format_exception(error)), misuse)


def messages(host: Host, work: Work) -> Iterator[Message]:
    """Do a piece of work. A generator whatever it is: Ray sends values to it, of which a list's iterator takes none."""
    if isinstance(work, Ask):
        yield getattr(host, work.what)(work.slots, work.number)
    else:
        yield from host.run(work)


class Crew:
    """`count` workers at most, with neighbouring slots each; started when they are needed."""

    def __init__(
        self,
        description: Description,
        worker: Callable[[Description, range, Inbox], Worker],
        count: int,
        num_envs: int,
        *,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        bounds = [num_envs * w // count for w in range(count + 1)]
        self.parts = [range(*pair) for pair in zip(bounds, bounds[1:], strict=False) if pair[0] < pair[1]]
        self.description, self.worker = description, worker
        self.workers: list[Worker] = []
        self.restarts = 0
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self._inbox: Inbox = queue.SimpleQueue()

    def start(self) -> None:
        if not self.workers:
            self.workers = [self.worker(self.description, part, self._inbox) for part in self.parts]

    def send(self, worker: Worker, work: Work, slots: list[int]) -> None:
        """Give a worker something to do, of which it is to report these slots."""
        if not worker.open:
            self.expect(worker, starting=isinstance(work, Run) and not work.chunks)
        worker.open += slots
        worker.send(work)

    def expect(self, worker: Worker, *, starting: bool) -> None:
        """Begin to wait for the next message of a worker."""
        worker.deadline = time.monotonic() + (self.start_timeout_s if starting else self.timeout_s)

    def next(self, workers: Collection[Worker]) -> tuple[Worker, Any]:
        """The next message of any worker, WorkerLost for one that is too late, which is killed; it may no longer be
        among `workers`."""
        soonest = min(workers, key=lambda worker: worker.deadline)
        try:
            return self._inbox.get(timeout=max(0.0, soonest.deadline - time.monotonic()))
        except queue.Empty:
            soonest.kill()
            return soonest, WorkerLost("it was killed, having sent nothing for the time that is allowed (timeout)")

    def restart(self, worker: Worker) -> Worker:
        """A successor of one that is gone."""
        self.restarts += 1
        worker.end(kill=True)
        successor = self.worker(self.description, worker.slots, self._inbox)
        self.workers[self.workers.index(worker)] = successor
        return successor

    def end(self, *, kill: bool) -> None:
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.end(kill=kill)


class FarSimulators(Simulators):
    """`Simulators` over `count` workers at most, of which `worker` makes each."""

    def __init__(
        self,
        description: Description,
        simulation: Simulation,
        worker: Callable[[Description, range, Inbox], Worker],
        count: int,
    ) -> None:
        super().__init__(description, simulation)
        times = {"timeout_s": simulation.timeout_s, "start_timeout_s": simulation.start_timeout_s}
        self.crew = Crew(description, worker, count, self.num_envs, **times)

    @property
    def restarts(self) -> int:  # type: ignore[override]
        """Workers that had to be started again."""
        return self.crew.restarts

    def close(self, *, kill: bool = False) -> None:
        """End all workers; another reset starts them again."""
        self.crew.end(kill=kill)
        super().close()

    def _play(self, run: Run, done: Round) -> None:
        """Send every worker its part and wait for all that they say."""
        self.crew.start()
        for worker in self.crew.workers:
            self._order(worker, run, worker.slots)
        while waiting := [worker for worker in self.crew.workers if worker.open]:
            worker, message = self.crew.next(waiting)
            # A message of a worker that was replaced may still be in the queue, which all share.
            if worker not in self.crew.workers:
                continue  # it is gone
            if isinstance(message, Outcome):
                slots = message.slots + worker.slots.start
                worker.open = [slot for slot in worker.open if slot not in slots.tolist()]
                self._take(message, slots, done)
            elif isinstance(message, WorkerLost):
                worker = self._lost(worker, message, run, done)
            else:
                self._fault(worker, message, run, done)
            if worker.open:
                self.crew.expect(worker, starting=worker.open[0] in run.begin)

    def _order(self, worker: Worker, run: Run, slots: Collection[int]) -> None:
        """Send a worker its part of a round, as far as it is of these slots."""
        first = worker.slots.start
        begin = {slot - first: run.begin[slot] for slot in slots if slot in run.begin}
        chunks = {slot - first: run.chunks[slot] for slot in slots if slot in run.chunks}
        if begin or chunks:
            ordered = sorted(slot + first for slot in begin.keys() | chunks.keys())
            self.crew.send(worker, Run(begin, chunks), ordered)
            self.crew.expect(worker, starting=worker.open[0] in run.begin)

    def _fault(self, worker: Worker, fault: Fault, run: Run, done: Round) -> None:
        """Judge what a host or an environment raised; an environment's worker goes on."""
        if fault.slot < 0 and not fault.misuse:
            worker.report = fault.report  # and it ends, which is told next
            return
        slot = fault.slot + worker.slots.start
        self._blame(fault, slot)
        worker.open.remove(slot)
        if slot in run.begin:
            run.begin[slot] = self._another(run.begin[slot])
            self._order(worker, Run(run.begin, {}), [slot])
        else:
            done.drop([slot])

    def _lost(self, worker: Worker, lost: WorkerLost, run: Run, done: Round) -> Worker:
        """Replace a worker: what it was to begin is begun again, or another episode where that loses it twice; what it
        ran is dropped, unless it had ended."""
        if worker.open:
            slot = worker.open[0]
            self._blame(Fault(slot, f"{lost}\n{worker.report}", misuse=False), slot)
            if slot in run.begin and self._failures[slot] > 1:  # once may be the machine's doing
                run.begin[slot] = self._another(run.begin[slot])
        ended = done.terminated | done.truncated
        done.drop([s for s in worker.slots if s in run.chunks and (s in worker.open or not ended[s])])
        successor = self.crew.restart(worker)
        self._order(successor, Run(run.begin, {}), worker.slots)
        return successor

    def _answer(self, ask: Ask, answer: NDArray[np.generic]) -> None:
        self.crew.start()
        rows_of: dict[Worker, list[int]] = {}
        for worker in self.crew.workers:
            rows = [row for row, slot in enumerate(ask.slots) if slot in worker.slots]
            if rows:
                rows_of[worker] = rows
                self.crew.send(worker, ask._replace(slots=[ask.slots[row] - worker.slots.start for row in rows]), [])
        while rows_of:
            worker, message = self.crew.next(rows_of)
            if worker not in rows_of:
                continue
            if isinstance(message, Fault):
                raise (ValueError if message.misuse else RuntimeError)(message.report)
            rows = rows_of.pop(worker)
            if isinstance(message, WorkerLost):
                self.crew.restart(worker)
                # Its episodes went with it, though nobody was in the middle of a step.
                self._vanished[worker.slots] = self._running[worker.slots]
                self._running[worker.slots] = False
            else:
                answer[rows] = message
