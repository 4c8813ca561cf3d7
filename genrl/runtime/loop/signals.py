"""Stopping on a signal, and stopping when nothing moves any more."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

import psutil

from genrl.runtime.folder.run import Run

HANG_EXIT_CODE = 124
PATIENCE = 10
"""How many times `timeout_s` a process may be silent while it computes."""
BUSY = 0.1
"""Share of the time on a processor from which on a process computes; more is not sure on a machine that is shared."""
# The watch within comes first, since it can say more than that nothing moved.
GRACE_S = 15
# A program of its own that needs nothing but Python: it is to start at once, and to judge a process that may be
# unable to run any code.
_OUTSIDE = """
import os, select, signal, sys
parent, limit, silent = int(sys.argv[1]), float(sys.argv[2]), 0
while os.getppid() == parent:
    if select.select([0], [], [], 1.0)[0]:
        if not os.read(0, 65536):
            break
        silent = 0
        continue
    try:
        stopped = open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        stopped = False
    silent += not stopped
    if silent > limit:
        text = f"no Python code could run for {limit:g} s: stopping. The stacks are in {sys.argv[3]}"
        os.write(2, f"\\ngenrl: {text}; `genrl resume` goes on from the last checkpoint.\\n".encode())
        os.kill(parent, signal.SIGABRT)
        break
"""
_ASKED = (signal.SIGINT, signal.SIGTERM)  # by someone; a terminal that closes may send SIGHUP several times
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
        """130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP (the shell's convention), 0 if nothing came."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def catch_stop(*, ends_process: bool = True) -> Iterator[Stop]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP (a closed terminal; not under `nohup`) sets `stop.requested`; a
    second one of the former exits at once, without saving.

    The loop then finishes its micro-batch, saves, and exits with `stop.exit_code`. With several processes ask
    `guards.any_rank(stop.requested, accelerator)`, so that all leave at the same place. ends_process: False = a second
    one raises KeyboardInterrupt, for a script that goes on. Signals reach the main thread only: in another one nothing
    is caught.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    first = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if stop.signal is None:
            stop.signal, first = number, time.monotonic()
            _say(f"{signal.Signals(number).name}: saving, then stopping. Once more to stop at once without saving.")
        elif time.monotonic() - first > _ECHO_S and number in _ASKED:
            _say("stopped without saving; `genrl resume` goes on from the last checkpoint.")
            if not ends_process:
                raise KeyboardInterrupt
            # Not sys.exit, which would wait for threads and for processes that may hang.
            os._exit(128 + number)

    caught = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        caught.append(signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in caught}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Watchdog:
    """Ends the process, with the stacks of all its threads on disk, when `beat` is not called for `timeout_s`.

    Each rank has its own: where one hangs, the others hang in a collective and all leave their stacks in
    `dumps/hang-rank-<r>.txt`. Exit code 124. `heartbeat/rank-<r>.json` tells the last phase, step and time.

    Time in which the process was stopped (a suspended job, a closed lid) does not count, and a process that computes is
    given `PATIENCE` times as long. Where the launcher of several processes is killed, they are asked to end. spins: it
    computes while it waits, as processes that share GPUs do, so that tells
    nothing. A second process watches over hangs that keep Python itself from running.
    """

    def __init__(self, run: Run, timeout_s: float, *, rank: int = 0, spins: bool = False) -> None:
        self.launcher = _launcher()
        self.timeout_s, self.spins = timeout_s, spins
        self.heartbeat = run.folder / "heartbeat" / f"rank-{rank}.json"
        self.stacks = run.dumps / f"hang-rank-{rank}.txt"
        self.phase, self.step, self.last = "starting", 0, time.monotonic()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="genrl-watchdog", daemon=True)

    def __enter__(self) -> Self:
        for path in (self.heartbeat, self.stacks):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.stacks.open("w")
        self.enabled = faulthandler.is_enabled()
        faulthandler.enable(self.file)
        # -I and -S: without the site packages it starts in milliseconds and needs nothing that may be broken.
        command = [sys.executable, "-I", "-S", "-c", _OUTSIDE, str(os.getpid()), str(self.timeout_s + GRACE_S)]
        self.outside: subprocess.Popen[bytes] | None = None  # it waits for a pipe, which Windows cannot
        if sys.platform != "win32":
            arguments = [*command, str(self.stacks)]
            # A session of its own: Ctrl-C goes to all processes of a terminal, and would end the one that is to watch.
            self.outside = subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)
        self.beat("starting", 0)
        self._write_heartbeat()
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        self.thread.join()
        if self.outside is not None:
            self.outside.kill()
            self.outside.communicate()
        faulthandler.enable(2) if self.enabled else faulthandler.disable()
        self.file.close()
        self.stacks.unlink(missing_ok=True)
        self.heartbeat.unlink(missing_ok=True)

    def beat(self, phase: str, step: int) -> None:
        """Progress was made. Call it at least once per micro-batch, reward call and file written."""
        self.phase, self.step, self.last = phase, step, time.monotonic()

    def _watch(self) -> None:
        tick, before, last_beat = min(1.0, self.timeout_s / 10), time.monotonic(), 0.0
        silent, cpu, warned = 0.0, 0.0, False
        while not self.closed.wait(tick):
            self._tell_outside()
            if self.launcher is not None and os.getppid() != self.launcher:
                self.launcher = None
                _say("the launcher is gone")
                os.kill(os.getpid(), signal.SIGTERM)  # `catch_stop`: save and stop
            now = time.monotonic()
            elapsed, before = now - before, now
            if self.last != last_beat:
                last_beat, silent, cpu, warned = self.last, 0.0, time.process_time(), False
                self._write_heartbeat()
                continue
            silent += min(elapsed, 2 * tick)  # more than that, and the process was stopped
            if silent <= self.timeout_s:
                continue
            computes = not self.spins and time.process_time() - cpu > BUSY * silent
            if not computes or silent > PATIENCE * self.timeout_s:
                self._end()
            if not warned:
                warned = True
                _say(
                    f"no progress for {self.timeout_s:g} s in {self.phase}, step {self.step}, but the process "
                    f"computes: it has {PATIENCE * self.timeout_s:g} s. For slow phases raise distributed.timeout_s."
                )

    def _tell_outside(self) -> None:
        if self.outside is None:
            return
        assert self.outside.stdin is not None
        with suppress(OSError):  # it is gone: hangs that hold the interpreter's lock are not seen any more
            os.write(self.outside.stdin.fileno(), b".")

    def _write_heartbeat(self, *, ended: bool = False) -> None:
        """ended: this process says itself why."""
        heartbeat = {
            "ended": ended,
            "phase": self.phase,
            "step": self.step,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        # Others read it at any time, and are never to see half of it.
        half = self.heartbeat.with_suffix(".half")
        with suppress(OSError):  # a full disk must not end the watch
            half.write_text(json.dumps(heartbeat | {"time": time.time() - (time.monotonic() - self.last)}))
            half.replace(self.heartbeat)

    def _end(self) -> None:
        self._write_heartbeat(ended=True)
        self.file.write(f"no progress for {self.timeout_s:g} s in {self.phase}, step {self.step}\n")
        self.file.flush()
        faulthandler.dump_traceback(self.file, all_threads=True)
        # `os._exit` writes nothing out, and anything else would wait for the threads that hang.
        os.fsync(self.file.fileno())
        _say(
            f"no progress for {self.timeout_s:g} s in {self.phase}, step {self.step}: stopping. The stacks of "
            f"all threads are in {self.stacks}; `genrl resume` goes on from the last checkpoint. If the "
            "phase was only slow, raise distributed.timeout_s."
        )
        os._exit(HANG_EXIT_CODE)


def _launcher() -> int | None:
    """The process that started this one as one of several, and should not end before it (of `--nproc`, or torchrun);
    None where there is none."""
    if "GENRL_LAUNCHER" in os.environ:
        pid = int(os.environ["GENRL_LAUNCHER"])
        return pid if os.getppid() == pid or not _runs(pid) else None  # else it started one between
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def killed_ranks(run: Run, processes: int, *, patience_s: float = 0.0) -> list[str]:
    """The ranks of this machine that are gone and could not say why, in words: they left their heartbeats.

    patience_s: how long to wait for one. A process closes its connections, of which the others hear, before it is gone.
    """
    until = time.monotonic() + patience_s
    while not (killed := _killed(run, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    return killed


def _killed(run: Run, processes: int) -> list[str]:
    return [
        f"rank {rank} (process {heartbeat.pid}, {heartbeat.phase} of iteration {heartbeat.step + 1})"
        for rank in range(processes)
        if (heartbeat := read_heartbeat(run.folder / "heartbeat" / f"rank-{rank}.json")) is not None
        and heartbeat.was_killed
    ]


@dataclass(frozen=True)
class Heartbeat:
    """What a process last wrote about itself; one that ended by itself, and has said why, leaves none."""

    ended: bool
    """Its watchdog ended it."""
    phase: str
    step: int
    """Finished iterations."""
    pid: int
    host: str
    time: float
    """Of its last progress, seconds since 1970."""

    @property
    def was_killed(self) -> bool:
        """Whether it is gone without having said why; False for a process of another machine, which is not seen."""
        return self.host == socket.gethostname() and not self.ended and not _runs(self.pid)


def read_heartbeat(path: Path) -> Heartbeat | None:
    """None where there is none, or none that this version of genrl wrote."""
    try:
        return Heartbeat(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _runs(pid: int) -> bool:
    """Whether this process is there, and no zombie that waits for its parent."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _say(text: str) -> None:
    """Straight to the file descriptor: a signal may arrive in the middle of a print. Nobody may read it any more."""
    with suppress(OSError, ValueError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\ngenrl: {text}\n".encode())
