"""Tiny whole runs on the CPU: a random-weight SD3 pipeline on disk, a few prompts, a reward in a file.

An iteration takes well under a second. Runs that have to be killed, or that need several processes, go through
`start`: the children are forked from one server that has done the imports (`multiprocessing`'s forkserver).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import yaml

from genrl.config import Config, load
from genrl.diffusion.session import Session
from genrl.diffusion.train import open_session, train
from genrl.runtime import checkpoint
from genrl.runtime.loop import make_accelerator
from genrl.runtime.metrics import document
from genrl.runtime.progress import Progress
from genrl.runtime.run import Run, read_metrics
from genrl.runtime.signals import Watchdog, catch_stop

PROMPTS = ["a red star", "two blue dogs", "one green square", "a cat"]
HELD_OUT = ["three stars", "a yellow dog"]

REWARDS = '''\
import random
import signal

import numpy as np
import torch


def brightness(images):
    """Mean of all pixels, 0 to 1."""
    return images.mean(dim=(1, 2, 3)).tolist()


def redness(images, prompts):
    """Red minus blue, with both as parts."""
    red, blue = images[:, 0].mean(dim=(1, 2)), images[:, 2].mean(dim=(1, 2))
    return (red - blue).tolist(), {"red": red.tolist(), "blue": blue.tolist()}


def warmth(images):
    """Red less blue and a little curvature, with gradients."""
    return (images[:, 0] - images[:, 2] + 0.3 * images[:, 1] ** 2).mean(dim=(1, 2))


warmth.differentiable = True


def nothing(images):
    """The same score for every picture."""
    return [0.5] * len(images)


class Interrupt:
    """Brightness, and a little noise from the global generators; in its `call`-th call the process sends itself a
    signal."""

    def __init__(self, number: int, call: int) -> None:
        self.number, self.left = number, call

    def __call__(self, images):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(self.number)
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return (images.mean(dim=(1, 2, 3)) + 0.01 * noise * torch.rand(len(images))).tolist()
'''


def write_folder(folder: Path) -> None:
    """Prompt files and rewards of the runs."""
    (folder / "train.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    (folder / "eval.txt").write_text("\n".join(HELD_OUT), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")


LORA: dict[str, Any] = {"rank": 4, "alpha": 8}


def settings(folder: Path, model: Path, *, lora: dict[str, Any] | None = LORA, **changes: Any) -> dict[str, Any]:
    """The YAML of a tiny Flow-GRPO run in `folder`; `changes` are sections, merged key by key but for the trainer."""
    tree: dict[str, Any] = {
        "model": {"path": str(model), "lora": lora},
        "prompts": {"train": str(folder / "train.txt"), "eval": str(folder / "eval.txt")},
        "rewards": [{"name": f"{folder / 'rewards.py'}:brightness"}],
        "sampling": {
            "num_inference_steps": 3,
            "guidance_scale": 1.0,
            "height": 16,
            "width": 16,
            "prompts_per_iteration": 2,
            "group_size": 2,
            "batch_size": 2,
            "pipeline_args": {"max_sequence_length": 4},
        },
        "trainer": {"algorithm": "flow_grpo"},
        "optimizer": {"lr": 1e-2},
        "evaluation": {"every": 2, "num_prompts": 2, "grid_prompts": 2},
        "checkpoint": {"every": 1},
        "trackers": [],
        "iterations": 2,
        "output": str(folder / "run"),
    }
    for section, change in changes.items():
        old = tree.get(section)
        replaces = not isinstance(old, dict) or not isinstance(change, Mapping) or "algorithm" in change
        tree[section] = change if replaces else {**old, **change}
    return tree


def config(folder: Path, model: Path, **changes: Any) -> Config:
    """`settings` through a YAML file and the loader, as the command line would."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings(folder, model, **changes)), encoding="utf-8")
    return load(path)


NFT = {"algorithm": "diffusion_nft"}


def reward(folder: Path, name: str, **extra: Any) -> dict[str, Any]:
    return {"name": f"{folder / 'rewards.py'}:{name}", **extra}


@contextmanager
def session(config: Config) -> Iterator[Session]:
    """The session of a new run, as `train` opens it: for tests that look at a trainer from inside."""
    run = Run(Path(config.output))
    torch.manual_seed(config.seed)
    with catch_stop() as stop, Watchdog(run, 600) as watchdog, Progress(config.iterations) as progress:
        yield open_session(config, make_accelerator(config.distributed.timeout_s), run, progress, watchdog, stop)


# -- what a run left behind --------------------------------------------------------------------------------------


def rows(run: Path) -> list[dict[str, Any]]:
    """The metric rows, without what differs from run to run (times, memory)."""
    kept = read_metrics(Run(run).metrics)
    return [{k: v for k, v in row.items() if k == "step" or document(k).reproducible} for row in kept]


def last_state(run: Path) -> checkpoint.Loaded:
    """The newest checkpoint."""
    path = checkpoint.latest(Run(run).checkpoints)
    assert path is not None
    return checkpoint.load(path)


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two finished runs: weights, snapshots, optimiser, metrics. Empty: equal to the bit."""
    a, b = last_state(one), last_state(other)
    found = [] if a.step == b.step else [f"step {a.step} and {b.step}"]
    # A row that waits for its evaluation is in the checkpoint of the run that was stopped, and in the other's metrics.
    if {**a.state, "unfinished_row": None} != {**b.state, "unfinished_row": None}:
        found.append("state.json")
    for stem in sorted(a.tensors.keys() | b.tensors.keys()):
        left, right = a.tensors.get(stem, {}), b.tensors.get(stem, {})
        if left.keys() != right.keys():
            found.append(f"{stem}: names")
        found += [f"{stem}: {k}" for k in left.keys() & right.keys() if not torch.equal(left[k], right[k])]
    ours, theirs = rows(one), rows(other)
    if [row["step"] for row in ours] != [row["step"] for row in theirs]:
        found.append(f"rows of steps {[r['step'] for r in ours]} and {[r['step'] for r in theirs]}")
    for mine, yours in zip(ours, theirs, strict=False):
        keys = sorted(mine.keys() | yours.keys())
        found += [f"row {mine['step']}: {k}" for k in keys if mine.get(k) != yours.get(k)]
    return found


# -- runs in processes of their own ------------------------------------------------------------------------------


@cache
def _forkserver() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def start(target: Callable[..., None], *arguments: Any, log: Path, environment: Mapping[str, str] = {}) -> BaseProcess:
    """Run `target(*arguments)` in a child that is forked from a process with all imports done; CPU only.

    What it prints goes into `log`. Its exit code is that of SystemExit, 1 after an exception.
    """
    process = _forkserver().Process(target=_child, args=(target, arguments, str(log), dict(environment)), daemon=True)
    process.start()
    return process


def start_ranks(count: int, target: Callable[..., None], *arguments: Any, log: Path) -> list[BaseProcess]:
    """The same in `count` processes that find each other as those of `torchrun` do (gloo)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
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


def train_file(path: str, resume: str | None = None) -> None:
    """Child: train the YAML file, or go on in the folder `resume`."""
    train(load(Path(path)), Path(resume) if resume else None)


def _child(target: Callable[..., None], arguments: tuple[Any, ...], log: str, environment: Mapping[str, str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)
    os.environ.update(environment | {"CUDA_VISIBLE_DEVICES": ""})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    target(*arguments)
