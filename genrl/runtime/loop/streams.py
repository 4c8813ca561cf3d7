"""Standard output and error that may go away: a closed terminal, a reader that has left, a log on a full disk. A line
that cannot be shown is no reason to lose a run."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

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
