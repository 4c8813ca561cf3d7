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
import json, os, signal, socket, sys
from contextlib import suppress
with suppress(ImportError):  # an old tree may have none
    from genrl_rewards.models.torchvision_compat import ensure
    ensure()
import accelerate, diffusers, peft, torch, transformers

def start(job, environment):
    child = os.fork()
    if child:
        return child
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((nothing, 0), (nothing, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(environment)
    sys.argv = ["genrl", *job["arguments"]]
    from genrl.cli import main
    main()
    sys.exit()

def ranks(count):
    if count == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    return [{name: str(value) for name, value in one.items()} for one in each]

for line in sys.stdin:
    job = json.loads(line)
    children, code = [start(job, environment) for environment in ranks(job["processes"])], 0
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in children:
                os.kill(other, signal.SIGKILL)
    print(code, flush=True)
"""
"""A process that has imported the libraries and runs one `genrl` command after another, each in a fork of itself: else
most of a brief run would be imports. Several processes find each other as those of torchrun do, and those of
`genrl train --nproc`. PYTHONPATH says whose genrl it is."""

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
        began = time.monotonic()
        code = self._call({"arguments": arguments, "log": str(log), "processes": processes})
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
        # its rewards too, not those of the checkout that is installed
        path = os.pathsep.join([str(self._root), str(self._root / "rewards")])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
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
    """With what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _tail(log: Path, lines: int = 12) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
