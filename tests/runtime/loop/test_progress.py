"""A live line on a terminal, few plain lines elsewhere, nothing on other processes."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from genrl.runtime.loop.process import _SETTINGS, GlobalSettings
from genrl.runtime.loop.progress import Progress, Tolerant, duration, tolerant_streams
from tests.runtime.loop.loops import loop


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(clock: Clock, *, terminal: bool, enabled: bool = True, start: int = 0) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with Progress(10, start=start, enabled=enabled, console=console, clock=clock) as progress:
        for step in range(start, 10):
            progress.phase("sampling", 64)
            clock.now += 1
            progress.advance(32)
            clock.now += 1
            progress.finish_iteration(step + 1, {"reward/total_mean": step / 10, "kl": None, "images_per_s": 32.0})
    return out.getvalue()


def test_plain_lines_are_few_and_the_last_is_always_there() -> None:
    assert run(Clock(), terminal=False).splitlines() == [
        "iteration 1/10  reward 0  images/s 32  18 s left",
        "iteration 4/10  reward 0.3  images/s 32  12 s left",
        "iteration 7/10  reward 0.6  images/s 32  6 s left",
        "iteration 10/10  reward 0.9  images/s 32  took 20 s",
    ]
    assert "iteration 7/10  reward 0.6  images/s 32  6 s left" in run(Clock(), terminal=False, start=6)
    assert run(Clock(), terminal=False, enabled=False) == run(Clock(), terminal=True, enabled=False) == ""
    out = run(Clock(), terminal=True)
    assert all(f"iteration {step}/10  reward" in out for step in range(1, 11))
    assert "\x1b[2K" in out  # the live line is wiped


def test_the_live_line_and_the_time_left() -> None:
    clock = Clock()
    progress = Progress(10, console=Console(file=io.StringIO()), clock=clock)
    progress.phase("scoring", 64)
    assert progress._line().plain.split() == "scoring iteration 1/10 0/64 0 s so far".split()
    clock.now += 2
    progress.advance(32)
    assert progress._line().plain.split() == "scoring iteration 1/10 32/64 16 images/s 2 s so far".split()
    progress.finish_iteration(1, {})
    progress.phase("training")
    assert progress._line().plain.split() == "training iteration 2/10 18 s left".split()
    progress = Progress(10, console=Console(file=io.StringIO()), clock=clock)
    clock.now += 30  # loading, and an evaluation
    for seconds, left in ((4, 36), (2, 16), (2, 14)):
        progress.begin_iteration()
        clock.now += seconds
        progress.finish_iteration(progress.done + 1, {})
        assert progress.seconds_left() == left


def test_durations_and_markup_in_what_is_said() -> None:
    texts = {0.4: "0 s", 59: "59 s", 61: "1 min 01 s", 3599.6: "1 h 00 min", 7500: "2 h 05 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
    out = io.StringIO()
    Progress(1, console=Console(file=out)).say("[red]prompt[/red] 3")
    assert out.getvalue() == "[red]prompt[/red] 3\n"


# -- A run goes on where nobody reads what it says any more
TALKS = """
import sys, time
from genrl.runtime.loop.progress import Progress
from genrl.runtime.loop.progress import tolerant_streams
with tolerant_streams(), Progress(3) as progress:
    sys.stdin.readline()
    for step in range(3):
        print("a reward says" * 9999)
        sys.stdout.flush()
        sys.stderr.write("a warning" * 9999)
        progress.say("progress says" * 9999)
sys.exit(143)
"""


class Broken(io.RawIOBase):
    """A file whose writes fail with one error, as long as it is set."""

    def __init__(self, number: int) -> None:
        self.number, self.content = number, b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.number:
            raise OSError(self.number, "broken")
        self.content += bytes(data)
        return len(data)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EBADF, errno.EDQUOT])
def test_no_error_of_a_stream_comes_through(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Broken(number)
    stream = io.TextIOWrapper(io.BufferedWriter(raw), write_through=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with tolerant_streams():
        assert isinstance(sys.stderr, Tolerant) and sys.stderr.isatty() is False
        Progress(3).say("a line")
        print("another", file=sys.stderr, flush=True)
        sys.stderr.writelines(["a", "b"])
        raw.number = 0
        Console(stderr=True).print("there is room again")
    assert sys.stderr is stream
    assert b"there is room again" in raw.content


def test_streams_of_notebooks_and_tests_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    with tolerant_streams():
        assert sys.stdout is stream


@pytest.mark.parametrize("reader", ["leaves", "/dev/full"])
def test_a_process_whose_reader_leaves_ends_with_its_own_code(reader: str) -> None:
    if reader != "leaves" and not Path(reader).exists():
        pytest.skip("there is no /dev/full")
    out = subprocess.PIPE if reader == "leaves" else open(reader, "w")  # noqa: SIM115
    process = subprocess.Popen([sys.executable, "-c", TALKS], stdin=subprocess.PIPE, stdout=out, stderr=out)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(timeout=120) == 143


# -- What code of others changes for the whole process is put back, and said once
CHANGES: dict[str, Callable[[], object]] = {
    "the current folder": lambda: os.chdir("/"),
    "torch's number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's float32 matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
}


@pytest.mark.parametrize("name", list(_SETTINGS))
def test_a_change_is_put_back(name: str, caplog: pytest.LogCaptureFixture) -> None:
    get, put = _SETTINGS[name]
    before, settings = get(), GlobalSettings()
    try:
        for _ in range(2):
            CHANGES[name]()
            assert get() != before
            settings.put_back()
            assert get() == before
    finally:
        put(before)
    assert len(caplog.messages) == 1 and name in caplog.text


def test_each_phase_begins_with_them_and_a_removed_folder_is_no_error(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    settings = GlobalSettings()
    (tmp_path / "inner").mkdir()
    os.chdir(tmp_path / "inner")
    (tmp_path / "inner").rmdir()
    settings.put_back()
    assert Path.cwd() == tmp_path
    one = loop(tmp_path)
    for _ in one.iterations():
        os.chdir("/")
        one.phase("training")
        assert Path.cwd() == tmp_path
        os.chdir("/")
        break
    next(one.iterations())
    assert Path.cwd() == tmp_path
