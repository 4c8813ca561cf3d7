"""`genrl train` and all that follows it on the embedded model; several processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from genrl.cli.train import launch
from tests.cli.commands import MODEL, ROOT, run, words
from tests.runtime.show.pages.folders import log, make


def test_a_users_files_hide_no_package(folder: Path) -> None:
    """A user's rewards.py beside the YAML is the most natural name there is."""
    for name in ("rewards", "tests", "data", "utils"):
        (folder / f"{name}.py").write_text("raise RuntimeError('not this file')\n")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'rewards'}"}
    code = "import genrl, genrl_rewards; from genrl.config import load; load('small.yaml')"  # `-c` searches here first
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True, timeout=120)


class TestLaunch:
    """`--nproc`: several processes of the same command, without the option."""

    @pytest.mark.parametrize("option", [["--nproc", "2"], ["--nproc=2"]])
    def test_command(self, option: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[Any] = []

        def launch(*given: Any) -> int:
            started.extend(given)
            return 143

        arguments = ["train", "small.yaml", *option, "model.path=org/model", "seed=2"]
        monkeypatch.setattr("genrl.cli.train.launch", launch)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(sys, "argv", ["genrl", *arguments])
        run(*arguments, code=143)
        command, count, environment = started
        assert command[1:] == ["-m", "genrl", "train", "small.yaml", "model.path=org/model", "seed=2"] and count == 2
        assert int(environment["OMP_NUM_THREADS"]) >= 1 and environment["PYTHONSAFEPATH"] == "1"

    def test_inside_a_launcher_it_just_runs(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "1")
        text = words(run("train", "small.yaml", "model.path=org/model", "--nproc", "2", code=2))
        assert "already is one of several" in text


def test_a_whole_run(folder: Path) -> None:
    """train, resume, sample, eval, report, export on the embedded model, in one process."""
    from genrl.config import load
    from genrl.diffusion.config.estimate import plan, read_components

    run("train", "small.yaml", "iterations=2")
    first = folder / "runs" / "small"
    rows = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    expected = plan(load("small.yaml"), read_components(MODEL))
    # The second iteration: in the first the pipeline is probed, and the old policy still is the present one.
    assert rows[-1]["model_calls/sample"] == expected.sample_calls
    assert rows[-1]["model_calls/train"] == expected.train_calls
    assert load(first / "config.yaml") == load("small.yaml", ["iterations=2"])
    assert "is not empty" in run("train", "small.yaml", code=2)
    more = "runs/small has done all of its 2 iterations; for more of them: genrl resume runs/small iterations=102"
    assert more in run("resume", "runs/small")
    assert "has done all" not in run("resume", "runs/small", "iterations=3")
    assert load(first / "config.yaml").iterations == 3
    assert "2 pictures" in run("sample", "runs/small", "--prompt", "a star", "--prompt", "a ring", "--out", "drawn")
    assert {path.name for path in (folder / "drawn").iterdir()} >= {"00000.png", "00001.png", "grid.png"}
    # The newest checkpoint's adapter, not that of an earlier end of the run; nor of a save that was cut short.
    shutil.copytree(first / "checkpoints" / "step-000003", first / "checkpoints" / "step-000004.tmp-1")
    text = run("eval", "runs/small", "--out", "new/scores.json", "--num-prompts", "1", "--batch-size", "1")
    scores = json.loads((folder / "new" / "scores.json").read_text())
    assert "eval/brightness_mean" in text and scores["num_prompts"] == 1
    assert scores["lora"] == "runs/small/checkpoints/step-000003/lora"
    assert "report.html" in run("report", "runs/small")
    run("export", "runs/small", "--out", "lora")
    assert (folder / "lora" / "README.md").is_file() and list((folder / "lora").glob("*.safetensors"))


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    """`genrl train --nproc 2` as it is typed: it says once that one of them waits. The reward runs isolated, a third
    program. None of them takes a file beside the YAML for a package of the same name."""
    for name in ("rewards", "tests", "data", "utils", "datasets", "genrl"):
        (folder / f"{name}.py").write_text("raise RuntimeError('not this file')\n")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'rewards'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "genrl", "train", "small.yaml", "--nproc", "2", "output=two"]
    command += ["rewards.0.isolate=true"]
    command += ["sampling.prompts_per_iteration=1", "sampling.group_size=3"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((folder / "two" / "run.json").read_text())["processes"] == 2
    printed = words(done.stdout + done.stderr)
    waits = "share 2 micro-batches of 2 samples in an optimiser step, and some wait: about 1.50 times as fast"
    assert printed.count(waits) == 1 and "with sampling.prompts_per_iteration=2 none does" in printed


# -- The launcher of `--nproc`: signals are passed on, savings waited for, exit codes told, failures end the others
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
    number: signal.Signals, tmp_path: Path, monkeypatch: Any
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


# -- `genrl watch` as it is typed
@pytest.mark.skipif(os.name == "nt", reason="there is no SIGINT to send")
def test_it_prints_its_address_serves_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    log(make(tmp_path / "run"), [{"step": 3, "loss": 0.5}])
    command = [sys.executable, "-m", "genrl", "watch", "run", "later"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in background
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, preexec_fn=heard, **pipes) as watching:
        try:
            assert watching.stdout is not None
            first, second = watching.stdout.readline(), watching.stdout.readline()
            assert "later is not there yet" in first
            result = re.match(r"(http://127\.0\.0\.1:\d+/)  \(Ctrl-C ends it\)", second)
            assert result, second
            with urllib.request.urlopen(f"{result[1]}state.json", timeout=20) as answer:
                assert b"3 of 10 iterations" in answer.read()
            watching.send_signal(signal.SIGINT)
            out, err = watching.communicate(timeout=20)
        finally:
            watching.kill()
    assert (watching.returncode, err) == (0, "") and "stopped watching; the runs go on" in out
