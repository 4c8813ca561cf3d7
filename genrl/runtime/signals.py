"""Stopping on a signal, and stopping when nothing moves any more."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Self

from genrl.runtime.run import Run

HANG_EXIT_CODE = 124
_ECHO_S = 1.0  # a launcher passes Ctrl-C on to workers which the terminal has already told


@dataclass
class Stop:
    """What the training loop looks at between micro-batches."""

    signal: int | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM (the shell's convention), 0 if nothing came."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def catch_stop() -> Iterator[Stop]:
    """Inside, the first SIGINT or SIGTERM sets `stop.requested`; a second one exits at once, without saving.

    The loop then finishes its micro-batch, saves, and exits with `stop.exit_code`. With several processes ask
    `guards.any_rank(stop.requested, accelerator)`, so that all leave at the same place. Main thread only.
    """
    stop = Stop()
    first = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if stop.signal is None:
            stop.signal, first = number, time.monotonic()
            _say(f"{signal.Signals(number).name}: saving, then stopping. Once more to stop at once without saving.")
        elif time.monotonic() - first > _ECHO_S:
            _say("stopped without saving; `genrl resume` goes on from the last checkpoint.")
            os._exit(128 + number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Watchdog:
    """Ends the process, with the stacks of all its threads on disk, when `beat` is not called for `timeout_s`.

    Each rank has its own: where one hangs, the others hang in a collective and all leave their stacks in
    `dumps/hang-rank-<r>.txt`. Exit code 124. `heartbeat/rank-<r>.json` tells the last phase, step and time.
    """

    def __init__(self, run: Run, timeout_s: float, *, rank: int = 0) -> None:
        self.timeout_s = timeout_s
        self.heartbeat = run.folder / "heartbeat" / f"rank-{rank}.json"
        self.stacks = run.dumps / f"hang-rank-{rank}.txt"
        self.phase, self.step, self.last = "starting", 0, time.monotonic()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="genrl-watchdog", daemon=True)

    def __enter__(self) -> Self:
        for path in (self.heartbeat, self.stacks):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.stacks.open("w")
        self.beat("starting", 0)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        self.file.close()
        self.stacks.unlink(missing_ok=True)
        self.heartbeat.unlink(missing_ok=True)

    def beat(self, phase: str, step: int) -> None:
        """Progress was made. Call it at least once per micro-batch, reward call and file written."""
        self.phase, self.step, self.last = phase, step, time.monotonic()
        # for a hang inside C code that holds the interpreter's lock, where the thread below cannot run
        faulthandler.dump_traceback_later(self.timeout_s + 15, exit=True, file=self.file)

    def _watch(self) -> None:
        written = 0.0
        while not self.closed.wait(min(1.0, self.timeout_s / 10)):
            silent = time.monotonic() - self.last
            if self.last != written:
                written = self.last
                seen = {"phase": self.phase, "step": self.step, "time": time.time() - silent}
                with suppress(OSError):  # a full disk must not end the watch
                    self.heartbeat.write_text(json.dumps(seen))
            if silent > self.timeout_s:
                self.file.write(f"no progress for {self.timeout_s:g} s in {self.phase}, step {self.step}\n")
                self.file.flush()
                faulthandler.dump_traceback(self.file, all_threads=True)
                os.fsync(self.file.fileno())
                _say(
                    f"no progress for {self.timeout_s:g} s in {self.phase}, step {self.step}: stopping. The stacks of "
                    f"all threads are in {self.stacks}; `genrl resume` goes on from the last checkpoint. If the "
                    "phase was only slow, raise distributed.timeout_s."
                )
                os._exit(HANG_EXIT_CODE)


def _say(text: str) -> None:
    """Straight to the file descriptor: a signal may arrive in the middle of a print."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\ngenrl: {text}\n".encode())
