"""A run goes on where nobody reads what it says any more."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from genrl.runtime.loop.progress import Progress
from genrl.runtime.loop.streams import Tolerant, tolerant_streams

TALKS = """
import sys, time
from genrl.runtime.loop.progress import Progress
from genrl.runtime.loop.streams import tolerant_streams
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
