"""Samples of coming iterations, which a second thread waits for while an iteration is trained (`versions`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
Advance = Callable[[int], None]
"""Is told that so much more is done."""

POLL_S = 0.2
"""How long the run's own thread sleeps without looking at signals."""


class Closed(Exception):
    """Nobody waits for samples any more."""


@dataclass
class Underway(Generic[T]):
    """An iteration on its way: how much of it is done, and its samples."""

    done: int = 0
    work: Future[T] | None = None


class Ahead(Generic[T]):
    """The iterations on their way, one after the other in the order they were begun."""

    def __init__(self) -> None:
        self.underway: dict[int, Underway[T]] = {}
        self._closing = Event()
        # One thread: iterations come in their order, and each may need what the one before has left. torch counts its
        # own threads by thread, and a new one would begin with all processors.
        self._thread = ThreadPoolExecutor(1, "ahead", torch.set_num_threads, (torch.get_num_threads(),))

    def begin(self, iteration: int, work: Callable[[Advance], T]) -> None:
        """Let the samples of an iteration be made by `work`, which is given whom to tell of its progress."""
        underway = self.underway[iteration] = Underway()

        def advance(count: int) -> None:
            if self._closing.is_set():
                raise Closed
            underway.done += count

        underway.work = self._thread.submit(work, advance)

    def take(self, iteration: int, advance: Advance) -> T:
        """Wait for its samples. advance: is told in this thread. Raises what the work raised, and Closed where another
        thread closes this."""
        underway, reported = self.underway[iteration], 0
        assert underway.work is not None
        # Waking now and then, for the progress that the other thread only notes: bars and watchdogs belong to this one.
        while not wait([underway.work], timeout=POLL_S).done:
            if self._closing.is_set():
                raise Closed
            if (done := underway.done) > reported:
                advance(done - reported)
                reported = done
        # Before `result`, which may raise: an iteration that failed is not to be found on its way.
        del self.underway[iteration]
        return underway.work.result()

    def close(self) -> None:
        """End what is on its way, where it next tells of its progress."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
