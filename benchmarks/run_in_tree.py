"""Runs of `genrl train` by the code of any tree of the repository, one after the other, without importing it here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks import run_entries

REFUSED = 2
"""Exit code of `genrl` for a configuration that it does not accept."""
TIMEOUT_S = 1200.0
SERVER = """
import json, os, sys
import accelerate, diffusers, peft, torch, transformers
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDWR)
        for source, target in ((nothing, 0), (nothing, 1), (log, 2)):
            os.dup2(source, target)
        sys.argv = ["genrl", *job["arguments"]]
        from genrl.cli import main
        main()
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that has imported the libraries and runs one `genrl` command after another, each in a fork of itself: else
most of a brief run would be imports. PYTHONPATH says whose genrl it is."""

Server = subprocess.Popen[str]


@dataclass(frozen=True)
class Outcome:
    """What a run left behind; where its exit code is not 0, no entries but the last lines of its stderr."""

    entries: run_entries.Entries
    code: int
    log: str
    seconds: float


class Tree:
    """A copy of the repository that trains by its own code. Calls from several threads run side by side."""

    def __init__(self, root: Path, runs: Path) -> None:
        """runs: folder for run folders and logs."""
        self._root, self._runs = root, runs
        self._idle: SimpleQueue[Server] = SimpleQueue()
        self._all: list[Server] = []
        runs.mkdir(parents=True, exist_ok=True)

    def train(self, config: str, changes: list[str], processes: int = 1) -> Outcome:
        """`genrl train config changes`, with the path of config relative to the repository."""
        output = self._runs / f"{config.removesuffix('.yaml').replace('/', '-')}-{processes}"
        log = self._runs / f"{output.name}.log"
        arguments = ["train", config, *changes, f"output={output}"]
        if processes > 1:
            arguments += ["--nproc", str(processes)]
        began = time.monotonic()
        code = self._call({"arguments": arguments, "log": str(log)})
        seconds = time.monotonic() - began
        return Outcome({} if code else run_entries.read(output), code, _tail(log), seconds)

    def close(self) -> None:
        for server in self._all:
            _end(server)

    def _call(self, request: dict[str, Any]) -> int:
        """The exit code; that of SIGKILL after TIMEOUT_S."""
        server = self._free_server()
        assert server.stdin is not None and server.stdout is not None
        late = threading.Timer(TIMEOUT_S, _end, [server])
        late.start()
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        finally:
            late.cancel()
        if not answer:
            return -signal.SIGKILL
        self._idle.put(server)
        return int(answer)

    def _free_server(self) -> Server:
        with suppress(Empty):
            return self._idle.get_nowait()
        environment = os.environ | {"PYTHONPATH": str(self._root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=self._root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._all.append(server)
        return server


def _end(server: Server) -> None:
    """With what it has started: torchrun puts its processes into sessions of their own, and ends them when told."""
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(patience_s)


def _tail(log: Path, lines: int = 12) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
