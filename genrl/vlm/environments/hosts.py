"""Where environments run: in this process, or each in one of its own, which is killed where it hangs."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from genrl.data.rows import flag
from genrl.vlm.config.sections import Environment as Settings
from genrl.vlm.environments.contract import Environment, Split, Told
from genrl.vlm.environments.discrete import Misuse
from genrl.vlm.environments.opening import open_environment

FAILURES = 3
"""So many losses of one slot, with no step between them, are an error."""
START_S = 120.0
"""Longest that a process may take to begin its first episode, if a step may not take longer."""


class Begin(NamedTuple):
    """The episode of a seed."""

    seed: int
    split: Split


class Say(NamedTuple):
    """A step."""

    text: str


class Draw(NamedTuple):
    """The scene."""


Work = Begin | Say | Draw


class Outcome(NamedTuple):
    """What an environment shows and tells after a piece of work. lost: it hung or died, and is no more."""

    observation: Told = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = {}
    picture: NDArray[np.uint8] | None = None
    lost: str = ""


class Host(Protocol):
    """The environments of some slots."""

    def do(self, work: Mapping[int, Work]) -> dict[int, Outcome]:
        """A piece of work for each of some slots. Raises what an environment raises, with its slot's place."""
        ...

    def close(self) -> None: ...


def open_host(settings: Settings) -> Host:
    """The host that `environment.processes` asks for."""
    return Processes(settings) if settings.processes else Local(settings)


def done(environment: Environment, work: Work) -> Outcome:
    """A piece of work."""
    if isinstance(work, Begin):
        return Outcome(environment.reset(work.seed, work.split))
    if isinstance(work, Draw):
        return Outcome(picture=environment.render())
    observation, reward, terminated, truncated, info = environment.step(work.text)
    who = f"{type(environment).__name__}.step: its"
    if not math.isfinite(reward):
        raise ValueError(f"{who} reward is {reward}, no finite number")
    ends = (flag(terminated, f"{who} terminated"), flag(truncated, f"{who} truncated"))
    return Outcome(observation, float(reward), *ends, info)


class Local:
    """In this process: what hangs, hangs; the run's watchdog ends it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.environments: dict[int, Environment] = {}

    def do(self, work: Mapping[int, Work]) -> dict[int, Outcome]:
        """See `Host`."""
        for slot in work:
            if slot not in self.environments:
                self.environments[slot] = open_environment(self.settings)
        return {slot: done(self.environments[slot], piece) for slot, piece in work.items()}

    def close(self) -> None:
        """Close them."""
        for environment in self.environments.values():
            environment.close()
        self.environments = {}


class Processes:
    """Each in a process of its own, spawned. One that says nothing in time, or dies, is killed and its slot is lost:
    the next episode begins in a new process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.running: dict[int, tuple[Any, Connection]] = {}
        self.failures: dict[int, int] = {}

    def do(self, work: Mapping[int, Work]) -> dict[int, Outcome]:
        """See `Host`. Raises RuntimeError where a slot is lost too often."""
        # All work at the same time, so each one's deadline counts from here and not from when it is listened to.
        begun, allowed = time.monotonic(), {}
        for slot, piece in work.items():
            new = slot not in self.running
            allowed[slot] = begun + (max(START_S, self.settings.timeout_s) if new else self.settings.timeout_s)
            if new:
                self.running[slot] = self._start()
            try:
                self.running[slot][1].send(piece)
            except OSError:
                pass  # it has died, which is seen below
        return {slot: self._heard(slot, piece, allowed[slot]) for slot, piece in work.items()}

    def close(self) -> None:
        """End them."""
        for process, connection in self.running.values():
            try:
                connection.send(None)
                process.join(2.0)
            except OSError:
                pass  # it has ended already
            _end_programs(process.pid)
            process.kill()
        self.running = {}

    def _start(self) -> tuple[Any, Connection]:
        # Not forked: a child would have a copy of the GPU's context and of every lock that some thread holds.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.settings), daemon=True)
        process.start()
        # Or this process would hold the other end open, and never see that the child has died.
        theirs.close()
        return process, ours

    def _heard(self, slot: int, piece: Work, deadline: float) -> Outcome:
        process, connection = self.running[slot]
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                message = connection.recv()
                if isinstance(message, Outcome):
                    self.failures[slot] = 0 if isinstance(piece, Say) else self.failures.get(slot, 0)
                    return message
                raise message
            why = f"said nothing for {self.settings.timeout_s:g} s (environment.timeout_s), and was killed"
        except (EOFError, OSError):
            process.join(5.0)
            why = f"died with exit code {process.exitcode}"
        _end_programs(process.pid)
        process.kill()
        process.join()
        del self.running[slot]
        self.failures[slot] = self.failures.get(slot, 0) + 1
        if self.failures[slot] >= FAILURES:
            raise RuntimeError(
                f"the environment {self.settings.name} of slot {slot} {why}; the last of {FAILURES} times with no step "
                f"between them. It was doing: {piece}. Mend it, or allow more time"
            )
        return Outcome(lost=why)


def _serve(connection: Connection, settings: Settings) -> None:
    """The life of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other side, which closes this one
    try:
        environment = open_environment(settings)
        while (work := connection.recv()) is not None:
            connection.send(done(environment, work))
        environment.close()
    except (EOFError, BrokenPipeError):
        _end_programs(os.getpid())
        os._exit(1)  # the other side is gone; an environment that hangs in its end must not keep this process
    except Misuse as error:
        connection.send(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side is told, and raises it
        connection.send(RuntimeError(f"{settings.name} raised {type(error).__name__}: {error}"))


def _end_programs(pid: int) -> None:
    """What a process has started, such as browsers, which would outlive it."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
