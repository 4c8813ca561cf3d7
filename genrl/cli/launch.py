"""Several processes of one command on this machine: started, told of signals, waited for as long as they need to save.

torchrun kills its processes 30 s after a signal, and exits with 1 whatever they exit with.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType

GRACE_S = 30.0
"""How long the others have to end by themselves, and say why, once one has failed."""
STOPPED = (129, 130, 143)
"""Exit codes of processes that were asked to end, and have saved."""
LAUNCHER = "GENRL_LAUNCHER"
"""Environment variable: the process id of the launcher, without which its processes save and end."""


def launch(command: Sequence[str], count: int, environment: Mapping[str, str], *, grace_s: float = GRACE_S) -> int:
    """Run `command` in `count` processes, which find each other as those of torchrun do; returns when all have ended.

    SIGINT, SIGTERM and SIGHUP are passed on, and their savings waited for. Returns the exit code of the first that
    failed (128 + n where signal n ended it), or else that of a process that was asked to end, or else 0.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), LAUNCHER: str(os.getpid())}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    processes: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # by nohup
    before = {number: signal.signal(number, pass_on) for number in heard}
    try:
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env={**environment, **shared, **own}))
            if asked:  # it came before this one was there
                processes[-1].send_signal(asked[0])
        return _wait(processes, grace_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> int:
    """Until all have ended; where one fails, for `grace_s` more."""
    failed, until = 0, float("inf")
    while True:
        codes = [process.poll() for process in processes]
        ended = [code if code >= 0 else 128 - code for code in codes if code is not None]
        failed = failed or next((code for code in ended if code and code not in STOPPED), 0)
        if None not in codes:
            return failed or max(ended)
        if failed and until == float("inf"):
            until = time.monotonic() + grace_s
        if time.monotonic() > until:
            return failed
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
