"""What runs of any kind left behind, compared, and runs in processes of their own.

Runs that have to be killed, or that need several processes, go through `start`: the children are forked from one server
that has done the imports (`multiprocessing`'s forkserver).
"""

import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import RunConfig, load
from genrl.config.method import metrics_of
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.metrics import document
from genrl.runtime.folder.run import Run, read_metrics
from tests.ports import free_port


def tiered(cases: Iterable[str], fast: Collection[str]) -> list[Any]:
    """Parameters of a test: those that are not in `fast` are slow."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def rows(run: Path) -> list[dict[str, Any]]:
    """The metric rows, without what differs from run to run (times, memory)."""
    kept, config = read_metrics(Run(run).metrics), Run(run).config
    own = metrics_of(type(load(config).trainer)) if config.is_file() else None
    return [{k: v for k, v in row.items() if k == "step" or document(k, own).reproducible} for row in kept]


def last_state(run: Path) -> checkpoint.Loaded:
    """The newest checkpoint."""
    path = checkpoint.latest(Run(run).checkpoints)
    assert path is not None
    return checkpoint.load(path)


def assert_resumes(train: Callable[..., Path], config: RunConfig, folder: Path) -> None:
    """Two iterations, and the second again from the checkpoint of the first: equal to the bit, and both move weights.
    config: of two iterations with a checkpoint after each; folder: where the second run goes."""
    straight, again = train(config), folder / "again"
    shutil.copytree(straight, again)
    shutil.rmtree(again / "checkpoints" / "step-000002")
    train(load(Run(again).config), again)
    assert differences(straight, again) == []
    assert all(row["updates"] > 0 for row in rows(straight)[1:])


def assert_one_run(train: Callable[..., Path], run: Path, folder: Path) -> None:
    """A finished run, resumed from each of its checkpoints but the last, ends with the same bits.
    run: with all its checkpoints; folder: where the copies go."""
    last = last_state(run).step
    for done in range(1, last):
        again = folder / f"again-{done}"
        shutil.copytree(run, again)
        for step in range(done + 1, last + 1):
            shutil.rmtree(again / "checkpoints" / f"step-{step:06d}")
        train(load(Run(again).config).model_copy(update={"output": str(again)}), again)
        assert differences(run, again) == []


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two finished runs: weights, snapshots, optimiser, metrics. Empty: equal to the bit."""
    a, b = last_state(one), last_state(other)
    result = [] if a.step == b.step else [f"step {a.step} and {b.step}"]
    # A row that waits for its evaluation is in the checkpoint of the run that was stopped, and in the other's metrics.
    if {**a.state, "unfinished_row": None} != {**b.state, "unfinished_row": None}:
        result.append("state.json")
    for stem in sorted(a.tensors.keys() | b.tensors.keys()):
        left, right = a.tensors.get(stem, {}), b.tensors.get(stem, {})
        if left.keys() != right.keys():
            result.append(f"{stem}: names")
        result += [f"{stem}: {k}" for k in left.keys() & right.keys() if not torch.equal(left[k], right[k])]
    ours, theirs = rows(one), rows(other)
    if [row["step"] for row in ours] != [row["step"] for row in theirs]:
        result.append(f"rows of steps {[r['step'] for r in ours]} and {[r['step'] for r in theirs]}")
    for mine, yours in zip(ours, theirs, strict=False):
        keys = sorted(mine.keys() | yours.keys())
        result += [f"row {mine['step']}: {k}" for k in keys if mine.get(k) != yours.get(k)]
    return result


# -- runs in processes of their own ------------------------------------------------------------------------------
@cache
def _forkserver() -> multiprocessing.context.ForkServerContext:
    """There is one server in a process, for children of all kinds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.conftest", "tests.forked"])  # in this order
    return context


def start(target: Callable[..., None], *arguments: Any, log: Path, environment: Mapping[str, str] = {}) -> BaseProcess:
    """Run `target(*arguments)` in a child that is forked from a process with all imports done; CPU only.

    What it prints goes into `log`. Its exit code is that of SystemExit, 1 after an exception.
    """
    context = _forkserver()
    process = context.Process(target=_child, args=(target, arguments, str(log), dict(environment)), daemon=True)
    process.start()
    return process


def start_ranks(
    count: int, target: Callable[..., None], *arguments: Any, log: Path, machines: int = 1
) -> list[BaseProcess]:
    """The same in `count` processes that find each other as those of `torchrun` do (gloo), as if on `machines`."""
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count // machines)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        start(
            target,
            *arguments,
            log=log.with_name(f"{log.stem}-rank-{rank}{log.suffix}"),
            environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]


def wait(processes: list[BaseProcess], timeout_s: float = 120.0) -> list[int | None]:
    """Exit codes (negative: killed by that signal); None, and killed, where one is not done in time."""
    deadline = time.monotonic() + timeout_s
    codes: list[int | None] = []
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        codes.append(process.exitcode)
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
    return codes


def _child(target: Callable[..., None], arguments: tuple[Any, ...], log: str, environment: Mapping[str, str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)
    os.environ.update(environment | {"CUDA_VISIBLE_DEVICES": ""})
    os.fsync = os.fstat  # as `no_waiting_for_the_disk` in tests/conftest.py, for the whole child
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    target(*arguments)


@contextmanager
def group() -> Iterator[int]:
    """The process group of `torchrun`'s variables; this process's rank."""
    torch.distributed.init_process_group("gloo")
    try:
        yield torch.distributed.get_rank()
    finally:
        torch.distributed.destroy_process_group()
