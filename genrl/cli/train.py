"""`genrl train`, `genrl resume`, and `genrl encode`, which encodes prompts before training."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from genrl.cli.arguments import ConfigFile, Overrides, RunFolder, default_device, opened, run_config

Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes: iterations, checkpoint, evaluation, trackers, output, where rewards run and samples come from.",
    ),
]
Processes = Annotated[int, typer.Option("--nproc", min=1, help="Processes on this machine, one per device.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the `genrl` command."""
    app.command()(train)
    app.command()(resume)
    app.command()(encode)


def train(
    file: ConfigFile,
    overrides: Overrides = None,
    nproc: Processes = 1,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Continue in this run folder with FILE as its configuration; see `genrl resume`."
        ),
    ] = None,
) -> None:
    """Train as a YAML file says.

    Example: `genrl train quickstart.yaml iterations=50 optimizer.lr=1e-4`

    A configuration on the hub: `genrl train hub:org/name/config.yaml`

    Several processes: `--nproc 2`, or start it yourself with torchrun or accelerate launch, on several machines too.
    """
    if resume:
        run_config(resume)
    start(file, overrides, resume, nproc)


def resume(run: RunFolder, overrides: Changes = None, nproc: Processes = 1) -> None:
    """Continue an interrupted run from its newest complete checkpoint.

    Example: `genrl resume runs/quickstart`. With `iterations=200` the run is made longer; a learning rate that falls
    (`optimizer.schedule`) is then that of the longer run, and jumps up where the shorter one had ended.
    """
    start(run_config(run), overrides, run, nproc)


def encode(file: ConfigFile, overrides: Overrides = None) -> None:
    """Encode all prompts of a configuration into its folder of encodings (`model.encodings`).

    Example: `genrl encode mine.yaml model.encodings=encodings`

    What is there is not encoded again. A run with `model.offload.text_encoders: encode_then_free` that finds all of its
    prompts there does not load its text encoders.
    """
    from rich.progress import Progress

    from genrl.cli.tables import console, size
    from genrl.config import check_files, load_located
    from genrl.diffusion.config.schema import Config

    config, origins = load_located(*opened(file, overrides))
    if not isinstance(config, Config):
        raise typer.BadParameter(f"{file} trains no pipeline, so there is nothing to encode", param_hint="FILE")
    check_files(config, origins)

    from genrl.diffusion import train

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("encoding", total=None)
        count, new, written = train.encode(
            config, default_device(), lambda done, total: bar.update(task, completed=done, total=total)
        )
    console.print(f"{count} prompts, {new} of them encoded now ({size(written)}): {config.model.encodings}")


def start(file: Path, overrides: list[str] | None, run: Path | None, nproc: int | None) -> None:
    """Train as a file says, in so many processes. run: the folder to go on in. nproc: None = two that share the
    samples, where there are two cores and no accelerator: two threads gain nothing in a call of a small model."""
    from genrl.config import check_files, load_located
    from genrl.diffusion.config.combinations import processes_problem
    from genrl.diffusion.config.schema import Config

    config, origins = load_located(*opened(file, overrides))
    inside = "RANK" in os.environ  # started by torchrun or accelerate: this is one of the processes
    if nproc is None:
        free = not inside and default_device() == "cpu" and (os.cpu_count() or 1) > 1
        nproc = 2 if free and isinstance(config, Config) and not processes_problem(config, 2) else 1
    if inside and nproc > 1:
        raise typer.BadParameter("--nproc starts processes, but this already is one of several: leave it out")
    notes = check_files(config, origins)
    if isinstance(config, Config) and not inside and (problem := processes_problem(config, nproc)):
        raise typer.BadParameter(problem, param_hint="--nproc")
    if int(os.environ.get("RANK", "0")) == 0:
        for note in notes:
            if not note.startswith("output:"):  # a folder in use is an error of its own
                _remark(note)
        if run:
            _say_if_done(run, config.iterations)
    if nproc > 1:
        _launch(file, overrides, run, nproc)
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads of one process starve those of the next

    from genrl.runtime.loop.frame import train as train_as

    train_as(config, run)


def _say_if_done(run: Path, iterations: int) -> None:
    saved = [path.name.removeprefix("step-") for path in run.glob("checkpoints/step-*")]
    done = max((int(step) for step in saved if step.isdigit()), default=0)  # others are of saves cut short
    if done >= iterations:
        from genrl.config.errors import command

        more = command("resume", run, f"iterations={done + 100}")
        _remark(f"{run} has done all of its {iterations} iterations; for more of them: {more}")


def _remark(text: str) -> None:
    from genrl.cli.tables import printable

    typer.secho(printable(text), fg=typer.colors.YELLOW, err=True)


def _launch(file: Path, overrides: list[str] | None, run: Path | None, nproc: int) -> None:
    """Be the launcher of the processes that train."""
    arguments = ["train", str(file), *(overrides or ()), *(("--resume", str(run)) if run else ())]
    # Each would otherwise start as many threads as there are cores.
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), **os.environ}
    # `-m` would search the current folder first, where a user's datasets.py or tests.py may lie
    environment["PYTHONSAFEPATH"] = "1"
    if status := launch([sys.executable, "-m", "genrl", *arguments], nproc, environment):
        raise typer.Exit(status)


# Several processes of one command on this machine: started, told of signals, waited for as long as they need to save.
#
# torchrun kills its processes 30 s after a signal, and exits with 1 whatever they exit with.

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
    signals: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        signals.append(number)
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
            if signals:  # it came before this one was there
                processes[-1].send_signal(signals[0])
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
        # `launch` kills those that are left.
        if time.monotonic() > until:
            return failed
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
