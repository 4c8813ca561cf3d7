"""What the person at the terminal sees: one live line, and one line per finished iteration.

Standard output and error that may go away: a closed terminal, a reader that has left, a log on a full disk. A line
that cannot be shown is no reason to lose a run.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

_SHOWN = {
    "reward/total_mean": "reward",
    "eval/total_mean": "eval",
    "rollout/success": "success",
    "eval/success_mean": "eval success",
    "eval/accuracy_mean": "accuracy",
    "rollout/env_steps": "env steps",
    "kl": "kl",
    "loss": "loss",
    "images_per_s": "images/s",
}


class Progress:
    """A live line: phase, images/s (or other `unit`), iteration, time left; quiet where `enabled` is false.

    Where standard error is no terminal there is no live line, and at most one plain line per `quiet_s` seconds.
    """

    def __init__(
        self,
        iterations: int,
        *,
        start: int = 0,
        enabled: bool = True,
        unit: str = "images",
        console: Console | None = None,
        quiet_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """iterations: of the whole run. start: finished ones, when resuming. enabled: main process only."""
        self.iterations, self.start, self.done = iterations, start, start
        self.unit = unit
        self.console = console or Console(stderr=True)
        self.enabled, self.quiet_s, self.clock = enabled, quiet_s, clock
        self.began = clock()
        self.finished = [self.began]
        """When the first iteration of this process began, and when each was finished."""
        self.name, self.total, self.count, self.phase_began = "starting", 0, 0.0, self.began
        self.each = 0.0  # images of a part of the phase
        self.printed = -float("inf")
        live = enabled and self.console.is_terminal
        self.live = (
            Live(get_renderable=self._line, console=self.console, refresh_per_second=4, transient=True)
            if live
            else None
        )

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def begin_iteration(self) -> None:
        """An iteration begins: the first one is timed from here, without loading and evaluation before it."""
        if len(self.finished) == 1:
            self.finished = [self.clock()]

    def phase(self, name: str, total: int = 0, parts: int = 0) -> None:
        """A phase begins ("sampling", "scoring", "training", "evaluating") with `total` images to do, in equal `parts`
        where it has some."""
        self.name, self.total, self.count, self.phase_began = name, total, 0.0, self.clock()
        self.each = total / parts if parts else 0.0

    def advance(self, images: float) -> None:
        """So many images of the phase's total are done; parts of one where each is gone through several times."""
        self.count += images

    def finish_iteration(self, step: int, values: Mapping[str, float | None]) -> None:
        """`step` iterations are finished; `values` as given to the metric logger."""
        self.done = step
        now = self.clock()
        self.finished.append(now)
        # A log file is not to grow by a line for every quick iteration.
        due = self.live is not None or now - self.printed >= self.quiet_s or step >= self.iterations
        if self.enabled and due:
            self.printed = now
            self.console.print(Text(self._summary(values)), soft_wrap=True)

    def say(self, text: str) -> None:
        """A line for the reader, above the live one."""
        if self.enabled:
            self.console.print(Text(text), soft_wrap=True)

    def seconds_left(self) -> float | None:
        """Estimate by the mean time of the iterations of this process, that of the running one taken off; without the
        first, in which much is done for the first time, once there is another. None before one has finished."""
        ends = self.finished if len(self.finished) < 3 else self.finished[1:]
        if len(ends) < 2:
            return None
        each = (ends[-1] - ends[0]) / (len(ends) - 1)
        return max(0.0, each * (self.iterations - self.done) - (self.clock() - ends[-1]))

    def _summary(self, values: Mapping[str, float | None]) -> str:
        parts = [f"{label} {values[key]:.4g}" for key, label in _SHOWN.items() if values.get(key) is not None]
        return "  ".join([f"iteration {self.done}/{self.iterations}", *parts, self._left()])

    def _left(self) -> str:
        if self.done >= self.iterations:
            return f"took {duration(self.clock() - self.began)}"
        left = self.seconds_left()
        return "" if left is None else f"{duration(left)} left"

    def _line(self) -> Text:
        seconds = self.clock() - self.phase_began
        running = min(self.done + 1, self.iterations)
        line = Text.assemble((f"{self.name:<10}", "bold cyan"), f" iteration {running}/{self.iterations}")
        if self.total:
            line.append(f"  {self.count:.0f}/{self.total}")
        if self.count and seconds > 0:
            line.append(f"  {self.count / seconds:.3g} {self.unit}/s", "green")
        left = self._left()
        return line.append(f"  {left}" if left else f"  {duration(self.clock() - self.began)} so far", "dim")


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    seconds_rounded = round(seconds)
    if seconds_rounded < 60:
        return f"{seconds_rounded} s"
    if seconds_rounded < 3600:
        return f"{seconds_rounded // 60} min {seconds_rounded % 60:02d} s"
    return f"{seconds_rounded // 3600} h {seconds_rounded % 3600 // 60:02d} min"


_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
"""Errors after which nobody reads the stream any more; on a full disk there may be room again."""


class Tolerant:
    """A text stream whose writes raise no OSError; all else is the stream's."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write as the stream does; what cannot be written is dropped."""
        try:
            return self.stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write lines as the stream does."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush as the stream does."""
        try:
            self.stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if error.errno in _GONE:
            _to_nowhere(self.stream)


@contextmanager
def tolerant_streams() -> Iterator[None]:
    """Within the block standard output and error are `Tolerant`, where they are files, pipes or terminals."""
    before = sys.stdout, sys.stderr
    wrapped_streams = [Tolerant(raw) if isinstance(raw, io.TextIOWrapper) else raw for raw in before]
    sys.stdout, sys.stderr = wrapped_streams
    try:
        yield
    finally:
        for wrapped, stream in zip(wrapped_streams, before, strict=True):
            if isinstance(wrapped, Tolerant):
                try:
                    stream.flush()
                except OSError:  # else the interpreter meets it at its end, and exits with 120
                    _to_nowhere(stream)
        if sys.stdout is wrapped_streams[0]:  # else somebody has put another one there
            sys.stdout = before[0]
        if sys.stderr is wrapped_streams[1]:
            sys.stderr = before[1]


def _to_nowhere(stream: TextIO) -> None:
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # The descriptor itself, by which libraries in C and child processes write as well.
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
