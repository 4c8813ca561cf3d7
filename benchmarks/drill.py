"""What drills share: a row of their table, and brief runs of the embedded configurations."""

from __future__ import annotations

import os
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from benchmarks import brief_runs
from genrl.config import RunConfig, load
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run
from genrl.runtime.loop import frame
from tests import run_folders

ROOT = Path(__file__).resolve().parents[1]


class Row(NamedTuple):
    """Of how many tries the outcome was right, and what was lost."""

    drill: str
    tries: int
    survived: int
    lost: str
    notes: tuple[str, ...] = ()
    """What went wrong, one line each."""


def config_of(name: str, folder: Path, iterations: int, **more: object) -> RunConfig:
    """A brief run of an embedded configuration."""
    small = brief_runs.overrides(brief_runs.load(ROOT / "configs" / name), iterations)
    small |= {"evaluation.every": 0, **more}
    changes = [f"{key}={value}" for key, value in small.items()]
    return load(ROOT / "configs" / name, [*changes, f"output={folder}", "trackers=[]"])


def train_file(path: str, resume: str | None) -> None:
    """Child: train the YAML file, or go on in the folder `resume`."""
    os.chdir(ROOT)
    frame.train(load(Path(path)), Path(resume) if resume else None)


def begun(path: Path, run: Path, log: Path) -> BaseProcess:
    resume = str(run) if Run(run).config.is_file() else None
    return run_folders.start(train_file, str(path), resume, log=log)


def newest(run: Path) -> int:
    """Number of finished iterations in the newest checkpoint; -1 without any."""
    last_checkpoint = checkpoint.latest(Run(run).checkpoints) if Run(run).checkpoints.is_dir() else None
    return int(last_checkpoint.name.removeprefix("step-")) if last_checkpoint else -1
