"""One signal: save and leave. A second: leave. No progress: leave with the stacks on disk. All in real processes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from genrl.runtime.folder.run import Run
from genrl.runtime.loop.signals import Watchdog, catch_stop, killed_ranks

LOOP = """
    import sys, time
    from genrl.runtime.loop.signals import catch_stop

    with catch_stop() as stop:
        print("ready", flush=True)
        while not stop.requested or "stubborn" in sys.argv:
            time.sleep(0.01)
        print("saved", flush=True)
    sys.exit(stop.exit_code)
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", textwrap.dedent(program), *arguments], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGHUP], [signal.SIGTERM, signal.SIGINT]])
def test_the_first_signal_lets_the_loop_save_and_its_echo_is_no_second(numbers: list[signal.Signals]) -> None:
    process = start(LOOP)
    for number in numbers:
        process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert out == "saved\n" and process.returncode in {128 + number for number in numbers}
    assert any(f"{number.name}: saving, then stopping" in err for number in numbers)


def test_the_second_signal_exits_at_once() -> None:
    process = start(LOOP, "stubborn")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (143, "")
    assert "stopped without saving" in err


def test_a_closed_terminal_is_a_stop_unless_it_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        with catch_stop() as stop:
            monkeypatch.setattr("genrl.runtime.loop.signals._ECHO_S", -1.0)
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.exit_code == 129
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with catch_stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with catch_stop() as stop:
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert not stop.requested and stop.exit_code == 0


HANG = """
    import ctypes, sys, time
    from pathlib import Path
    from genrl.runtime.folder.run import Run
    from genrl.runtime.loop.signals import Watchdog

    def wait_for_the_other_rank():
        if sys.argv[2] == "holding the lock":
            ctypes.PyDLL(None).sleep(60)
        time.sleep(60)

    with Watchdog(Run(Path(sys.argv[1])), 0.5, rank=1) as watchdog:
        print("ready", flush=True)
        for step in range(6):
            watchdog.beat("sampling", step)
            time.sleep(0.15)
        wait_for_the_other_rank()
"""


def test_a_hang_leaves_the_stacks_and_exits(tmp_path: Path) -> None:
    process = start(HANG, str(tmp_path), "politely")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 124
    stacks = (tmp_path / "dumps" / "hang-rank-1.txt").read_text()
    assert "no progress for 0.5 s in sampling, step 5" in stacks and "wait_for_the_other_rank" in stacks
    assert "hang-rank-1.txt" in err and "distributed.timeout_s" in err
    assert json.loads((tmp_path / "heartbeat" / "rank-1.json").read_text())["phase"] == "sampling"


@pytest.mark.slow
def test_a_hang_that_holds_the_interpreter_ends_too(tmp_path: Path) -> None:
    process = start(HANG, str(tmp_path), "holding the lock")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGABRT
    assert "wait_for_the_other_rank" in (tmp_path / "dumps" / "hang-rank-1.txt").read_text()


BUSY = """
    import sys, time
    from pathlib import Path
    from genrl.runtime.folder.run import Run
    from genrl.runtime.loop.signals import Watchdog

    with Watchdog(Run(Path(sys.argv[1])), 1.0, spins=sys.argv[2] == "spins") as watchdog:
        watchdog.beat("training", 3)
        print("ready", flush=True)
        begun = time.monotonic()
        while time.monotonic() - begun < float(sys.argv[3]):
            sum(range(1000))
        print("done", flush=True)
"""


@pytest.mark.slow
def test_a_process_that_computes_is_not_ended_nor_one_that_was_stopped(tmp_path: Path) -> None:
    process = start(BUSY, str(tmp_path), "alone", "6")
    for _ in range(2):
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        assert process.poll() is None
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out == "done\n"
    assert "no progress for 1 s in training, step 3, but the process computes: it has 10 s" in err


def test_where_processes_spin_computing_tells_nothing(tmp_path: Path) -> None:
    process = start(BUSY, str(tmp_path), "spins", "60")
    process.communicate(timeout=60)
    assert process.returncode == 124


def appeared(*paths: Path) -> bool:
    """Whether these files are there within half a minute."""
    for _ in range(300):
        if all(path.exists() for path in paths):
            return True
        time.sleep(0.1)
    return False


def test_a_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    with Watchdog(Run(tmp_path), 60, rank=0):
        process = start(HANG.replace("0.5, rank=1", "60, rank=1"), str(tmp_path), "politely")
        assert appeared(*(tmp_path / "heartbeat" / f"rank-{rank}.json" for rank in range(2)))
        assert killed_ranks(Run(tmp_path), 3) == []
        process.kill()
        time.sleep(0.2)  # a zombie now
        (result,) = killed_ranks(Run(tmp_path), 3)
        assert result.startswith(f"rank 1 (process {process.pid}, ")
        process.wait()
        assert killed_ranks(Run(tmp_path), 3) == [result]
    assert killed_ranks(Run(tmp_path), 1) == []
