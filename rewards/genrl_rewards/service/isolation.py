"""A reward in a process of its own, in this Python or in that of another virtual environment.

The process runs `genrl_rewards.service.serve` on 127.0.0.1 with a token of its own. It ends when this process ends,
whatever the reason. The other environment needs what the reward needs, and `fastapi`, `uvicorn`, `torch`, `numpy`,
`pillow`, `safetensors`; genrl need not be installed there.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from genrl_rewards.failures import RewardFailed
from genrl_rewards.loading import EMPTY
from genrl_rewards.service.remote import Outage, Remote, Server
from genrl_rewards.service.serve import TOKEN_VARIABLE

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
END_SECONDS = 5.0


class Isolated(Remote):
    """The reward `name`, loaded and run by another process; `close` ends it.

    venv: folder of a virtual environment; None: this Python. start_s: seconds that starting may take. Other arguments
    as of `rewards.load` and `Remote`. A process that dies is restarted, at most three times; then RewardFailed is
    raised. Raises ValueError, with the error that it reported, if the process cannot be started.
    """

    def __init__(
        self,
        name: str,
        args: Mapping[str, object] = EMPTY,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        venv: str | None = None,
        outage: Outage | None = None,
        stopped: Callable[[], bool] = lambda: False,
        start_s: float = 600.0,
    ):
        import torch

        self._python = python_of(venv) if venv else sys.executable
        threads = torch.get_num_threads()  # the same number there: sums in other pieces have other last bits
        settings = {"name": name, "args": dict(args), "device": device, "dtype": dtype, "threads": threads}
        self._asked = json.dumps(settings)
        self._name, self._start_s, self._restarts = name, start_s, 0
        # The port is open to every user of this machine.
        self._secret = secrets.token_urlsafe(32)
        self._process, url = self._start(name)
        try:
            super().__init__(url, name, token=self._secret, outage=outage, stopped=stopped)
        except (ValueError, RewardFailed):
            self.close()
            raise

    def close(self) -> None:
        """End the process. May be called twice."""
        self._end()

    @contextmanager
    def asked(self, among: Sequence[Server]) -> Iterator[str]:
        """Ask as a server is asked; the process is restarted first if it has died."""
        with self._lock:  # else a second thread that saw it dead would end the one that the first has started
            self._restart(among[0])
        with super().asked(among) as url:
            yield url

    def _restart(self, server: Server) -> None:
        """Start the process again if it has died. Raises RewardFailed where that does not help."""
        code = self._process.poll()
        if code is None or not self._end.alive:
            return
        failed: ValueError | None = None
        while self._restarts < MAX_RESTARTS:
            self._restarts += 1
            logger.warning("the process of reward %r ended (status %s); restarting it", self._name, code)
            self._end()
            try:
                self._process, server.url = self._start(self._name)
                return
            except ValueError as error:  # it may die while it starts, too: of memory, for one
                failed = error
        text = f"the process of reward {self._name!r} ended {MAX_RESTARTS + 1} times (status {code})"
        raise RewardFailed(text) from failed

    def _start(self, name: str) -> tuple[subprocess.Popen[str], str]:
        folder = tempfile.TemporaryDirectory(prefix="genrl-reward-")
        # Put this package alone on the path: the folder around it may hold this environment's other packages.
        os.symlink(Path(__file__).resolve().parents[1], Path(folder.name) / "genrl_rewards")
        path = os.pathsep.join(filter(None, [folder.name, os.environ.get("PYTHONPATH", "")]))
        try:
            process = subprocess.Popen(
                [self._python, "-m", "genrl_rewards.service.serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the run, which may still need scores before it ends
                # safe: a file of the current folder must not be taken for a package of the same name
                env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", TOKEN_VARIABLE: self._secret},
            )
        except OSError as error:
            folder.cleanup()
            raise ValueError(f"reward {name!r}: {self._python} cannot be started: {error.strerror}") from error
        # Also when this object is merely dropped, and at the end of the interpreter.
        self._end = weakref.finalize(self, _stop, process, folder)
        report = _ask(process, self._asked, self._start_s)
        if "port" not in report:
            self._end()
            ended = f"its process ended with status {process.returncode}; its output is above"
            raise ValueError(report.get("error") or f"reward {name!r} cannot be started by {self._python}: {ended}")
        return process, f"http://127.0.0.1:{report['port']}"


def python_of(venv: str) -> str:
    """The Python of a virtual environment. Raises ValueError if the folder is not one."""
    python = Path(venv) / "bin" / "python"
    if not python.exists():
        raise ValueError(f"isolate: {venv!r} is not a virtual environment: there is no {python}")
    # Not resolved: `bin/python` is a link to the system's interpreter, which finds its environment by the link's own
    # place.
    return str(python.absolute())


def _ask(process: subprocess.Popen[str], asked: str, seconds: float) -> dict[str, Any]:
    """Send the child what to serve; it replies with its port or an error once it is ready. {} if it ends before."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):  # it has ended, so it sends no line either
        print(asked, file=process.stdin, flush=True)
    with process.stdout as stream:
        ready, _, _ = select.select([stream], [], [], seconds)
        line = stream.readline() if ready else ""
    if not ready:
        return {"error": f"the process of the reward was not ready within {seconds:g} s"}
    report: dict[str, Any] = json.loads(line) if line.endswith("\n") else {}
    return report


def _stop(process: subprocess.Popen[str], folder: tempfile.TemporaryDirectory[str]) -> None:
    """Close the child's input, which ends it; kill it if that does not help."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # it has ended already
            process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    folder.cleanup()
