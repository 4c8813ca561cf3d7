"""Run folders as the pages read them, written by hand: configuration, rows, samples, heartbeats."""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from genrl.runtime.folder.run import json_line


def make(folder: Path, config: str = "iterations: 10\n") -> Path:
    """A run that was begun long ago, without a row."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    info = {"command": ["genrl"], "seed": 0, "processes": 1, "started": "2026-01-01T00:00:00+00:00", "versions": {}}
    (folder / "run.json").write_text(json.dumps(info))
    os.utime(folder / "run.json", (0, time.time() - 3600))
    return folder


def log(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows of metrics."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json_line(row) for row in rows))


def beat(folder: Path, rank: int = 0, *, ago: float = 0.0, **changed: object) -> None:
    """A heartbeat of this process, from so many seconds ago."""
    seen = {"ended": False, "phase": "sampling", "step": 2, "pid": os.getpid(), "host": socket.gethostname()}
    (folder / "heartbeat").mkdir(exist_ok=True)
    path = folder / "heartbeat" / f"rank-{rank}.json"
    path.write_text(json.dumps(seen | {"time": time.time() - ago} | changed))


def samples(
    folder: Path, step: int, prompts: list[str], scores: list[float | None], pictures: int | None = None
) -> None:
    """What an evaluation leaves: a sheet, pictures of the first prompts (default: of all), their rewards."""
    inner = folder / "samples" / f"step-{step:06d}"
    inner.mkdir(parents=True)
    for i in range(len(prompts) if pictures is None else pictures):
        Image.new("RGB", (16, 16), (step % 256, i % 256, 0)).save(inner / f"{i:02d}.png")
    Image.new("RGB", (64, 32), (step % 256, 0, 200)).save(inner.with_suffix(".png"))
    (inner / "samples.json").write_text(json.dumps({"step": step, "prompts": prompts, "rewards": {"shapes": scores}}))
