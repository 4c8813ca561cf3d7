"""`genrl watch` as it is typed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, run, words
from tests.runtime.show.pages.folders import log, make


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGINT to send")
def test_it_prints_its_address_serves_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    log(make(tmp_path / "run"), [{"step": 3, "loss": 0.5}])
    command = [sys.executable, "-m", "genrl", "watch", "run", "later"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored where the tests run in background
    ) as watching:
        try:
            assert watching.stdout is not None
            first, second = watching.stdout.readline(), watching.stdout.readline()
            assert "later is not there yet" in first
            found = re.match(r"(http://127\.0\.0\.1:\d+/)  \(Ctrl-C ends it\)", second)
            assert found, second
            with urllib.request.urlopen(f"{found[1]}state.json", timeout=20) as answer:
                assert b"3 of 10 iterations" in answer.read()
            watching.send_signal(signal.SIGINT)
            out, err = watching.communicate(timeout=20)
        finally:
            watching.kill()
    assert (watching.returncode, err) == (0, "") and "stopped watching; the runs go on" in out


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "a")
    assert "is not a run folder" in words(run("watch", str(tmp_path / "runs"), code=2))
