"""Where simulators run: in this process, or in processes of their own. On Ray actors: `ray_workers`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import psutil

from genrl.vla.simulators.contract import Ask, Description, Fault, Host, Message, Misuse, Render

Work = Any
"""`contract.Run`, `Render` or `Ask`; or what another kind of host is asked for, which answers as it likes."""


class WorkerLost(Exception):
    """A worker has ended or does not answer; says why."""


class Worker(Protocol):
    """Where a host runs."""

    inline: bool
    """Work is done where it is asked for; otherwise in a thread that waits for it."""

    def start(self) -> None: ...

    def do(self, work: Work) -> Iterator[Message]:
        """Messages as they come. Raises WorkerLost."""
        ...

    def memory(self) -> int:
        """Bytes that the process of the host and its children hold; 0 if it has none of its own on this machine."""
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

    def do(self, work: Work) -> Iterator[Message]:
        """See `Worker`."""
        assert self.host is not None
        return messages(self.host, work)

    def memory(self) -> int:
        """See `Worker`."""
        return 0

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

    def do(self, work: Work) -> Iterator[Message]:
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
        raise WorkerLost(f"its process {process.pid} ended with exit code {process.exitcode}")

    def memory(self) -> int:
        """See `Worker`. A process that has just ended holds nothing; the next round finds that out."""
        held = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            mine = psutil.Process(self.process.pid)
            for process in [mine, *mine.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    held += process.memory_info().rss
        return held

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
        connection.send(report(error, -1))


def report(error: Exception, slot: int) -> Fault:
    """What the other side is told of an exception."""
    misuse = isinstance(error, (Misuse, ModuleNotFoundError))
    return Fault(slot, str(error) if misuse else "".join(traceback.format_exception(error)), misuse)


def messages(host: Host, work: Work) -> Iterator[Message]:
    """Do a piece of work. A generator whatever it is: Ray sends values to it, of which a list's iterator takes none."""
    if isinstance(work, Render):
        yield host.render(work)
    elif isinstance(work, Ask):
        yield host.advise(work)
    else:
        yield from host.run(work)
