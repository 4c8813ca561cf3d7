"""The launcher of `--nproc`: signals are passed on, savings waited for, exit codes told, failures end the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from genrl.cli.train import launch

PROGRAM = """
import os, signal, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[1].split(",")[int(os.environ["RANK"])]
if what == "stops":
    asked = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, frame: asked.append(n))
    open(f"ready-{rank}", "w").close()
    while not asked:
        time.sleep(0.01)
    time.sleep(0.3)
    open(f"saved-{rank}", "w").close()
    sys.exit(128 + asked[0])
if what == "hangs":
    time.sleep(600)
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(what))
"""


def launched(what: str, grace_s: float = 0.2) -> int:
    count = what.count(",") + 1
    return launch([sys.executable, "-S", "-c", PROGRAM, what], count, dict(os.environ), grace_s=grace_s)


CODES = {"0,0": 0, "0,3": 3, "2,hangs": 2, "killed,hangs": 137, "143,1": 1, "0,143": 143, "130,killed": 137}


@pytest.mark.parametrize("what", list(CODES))
def test_exit_codes(what: str) -> None:
    assert launched(what) == CODES[what]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_the_saving_waited_for(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a failure would be."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(number)

    def ask() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=ask)
    thread.start()
    assert launched("stops,stops", grace_s=0.0) == 128 + number
    thread.join()
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert signal.getsignal(number) == before


ORPHAN = """
import os, signal, subprocess, sys
code = '''
import os, sys, time
from pathlib import Path
from genrl.runtime.folder.run import Run
from genrl.runtime.loop.signals import Watchdog, catch_stop
with catch_stop() as stop, Watchdog(Run(Path(sys.argv[1])), 2.0) as watchdog:
    print("ready", flush=True)
    while not stop.requested:
        watchdog.beat("sampling", 1)
        time.sleep(0.01)
Path(sys.argv[1], "saved").touch()
'''
child = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], env={**os.environ, sys.argv[2]: str(os.getpid())})
child.wait()
"""


@pytest.mark.parametrize("variable", ["GENRL_LAUNCHER", "TORCHELASTIC_RUN_ID"])
def test_processes_save_and_end_where_their_launcher_was_killed(variable: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, str(tmp_path), variable]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.kill()
    until = time.monotonic() + 30
    while not (tmp_path / "saved").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.communicate()  # the child has the pipe, too
    assert (tmp_path / "saved").exists()
