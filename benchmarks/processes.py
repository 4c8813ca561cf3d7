"""The same run by one process, by two that hold all weights or shares of them, and on Ray: how far apart they are.

    python -m benchmarks.processes [--only pipeline vlm vla] [--iterations 2]

Two iterations on the CPU of an embedded pipeline (Flow-GRPO), an embedded vision-language model (GRPO) and a tiny pi0
(PPO on MiniTable), in float32, each with LoRA and in full. Of each run: the largest difference of `loss` and
`grad_norm` over the iterations, and of the trained weights at the end, from those of one process; the largest deviation
from 1 of the ratio where nothing was trained yet; whether the run, stopped after its first iteration and resumed alike,
is the same to the bit; and, of two processes, how far weights are apart where one process goes on. Writes
processes.json.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import parser, save
from genrl.runtime.folder.run import Run, read_metrics
from tests.run_folders import differences, last_state
from tests.vla import published_runs

COMPARED = {"loss": ("loss", "loss/policy"), "grad_norm": ("grad_norm", "grad_norm/policy")}
"""Metrics of an update, and what they are called in runs of one kind or another."""
BRIEF = ["evaluation.every=0", "trackers=[]", "checkpoint.every=1"]
FLOW_GRPO = ["sampling.prompts_per_iteration=4", "sampling.group_size=4", "sampling.batch_size=4"]
GRPO = ["generation.prompts_per_iteration=8", "generation.group_size=4", "trainer.micro_batch=4"]
PPO = ["environment.num_envs=8", "environment.max_steps=8", "trainer.minibatch=8", "trainer.microbatch=4"]


@dataclass(frozen=True)
class Kind:
    """What is trained. changes: those of every run; adapted, whole: with LoRA and in full; ray: with actors."""

    file: str
    changes: list[str]
    adapted: list[str]
    whole: list[str]
    ray: list[str] = field(default_factory=list)


WAYS: dict[str, tuple[int, list[str]]] = {
    "1 process": (1, []),
    "2 replicated": (2, []),
    "2 sharded": (2, ["distributed.fsdp=true"]),
    "Ray": (1, []),
}


def kinds(place: Path) -> dict[str, Kind]:
    """By name; the policy is made in `place`."""
    published_runs.config(place, "pi0")
    return {
        "pipeline": Kind(
            "configs/flow_grpo.yaml",
            FLOW_GRPO,
            [],
            ["model.lora=null", "optimizer.lr=1e-5"],
            ["engine.rollout_workers=2"],
        ),
        "vlm": Kind("configs/vlm/grpo.yaml", GRPO, ["vlm.lora.rank=4"], ["vlm.lora=null"]),
        "vla": Kind(str(place / "tiny.yaml"), PPO, ["policy.lora.rank=4"], [], ["environment.workers=ray"]),
    }


def genrl(command: str, processes: int, target: str, changes: Sequence[str]) -> None:
    """A command line of one thread per process; RuntimeError with its last words where it fails."""
    words = [sys.executable, "-m", "genrl", command, target, *changes, "--nproc", str(processes)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stdout + done.stderr)[-3000:]}")


def run(kind: Kind, changes: list[str], processes: int, folder: Path, iterations: int) -> Path:
    """A whole run."""
    settings = [*BRIEF, *kind.changes, *changes, f"iterations={iterations}", f"output={folder}"]
    genrl("train", processes, kind.file, settings)
    return folder


def resumed(whole: Path, folder: Path, processes: int, changes: Sequence[str] = ()) -> Path:
    """The run again from its first checkpoint."""
    shutil.copytree(whole, folder)
    first, *later = sorted(Run(folder).checkpoints.iterdir())
    if int(first.name.removeprefix("step-")) != 1 or not later:
        raise RuntimeError(f"{whole}: the first checkpoint is {first.name}, and {len(later)} came after it")
    for saved in later:
        shutil.rmtree(saved)
    genrl("resume", processes, str(folder), changes)
    return folder


def apart(one: Path, other: Path) -> dict[str, float]:
    """Largest differences of two runs."""
    ours, theirs = (last_state(path).tensors["weights"] for path in (one, other))
    distances = {"weights": max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)}
    for key, names in COMPARED.items():
        rows = [[row[n] for row in read_metrics(Run(path).metrics) for n in names if n in row] for path in (one, other)]
        distances[key] = max(abs(a - b) for a, b in zip(*rows, strict=True))
    return distances


def on_policy(path: Path) -> float:
    """Largest deviation of the ratio, or of its logarithm, from what it is where nothing was trained."""
    row = next(row for row in read_metrics(Run(path).metrics) if row["step"] == 1)
    return max(row[key] for key in ("ratio/max_abs_dev", "rollout/log_prob_off", "sampler/gap_mean") if key in row)


def measure(kind: Kind, changes: list[str], folder: Path, iterations: int) -> dict[str, dict[str, Any]]:
    """Of every way to run it."""
    rows: dict[str, dict[str, Any]] = {}
    for way, (processes, more) in WAYS.items():
        if way == "Ray" and not kind.ray:
            continue
        given = [*changes, *more, *(kind.ray if way == "Ray" else [])]
        place = folder / way.replace(" ", "-")
        path = run(kind, given, processes, place / "run", iterations)
        again = resumed(path, place / "again", processes)
        row = apart(path, folder / "1-process" / "run") | {
            "ratio": on_policy(path),
            "resumed": not differences(path, again),
        }
        if processes > 1:
            fsdp = ["distributed.fsdp=false"] if more else []
            row["one goes on"] = apart(resumed(path, place / "one", 1, fsdp), path)["weights"]
        rows[way] = row
        print(way, row, flush=True)
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=("pipeline", "vlm", "vla"), default=["pipeline", "vlm", "vla"])
    arguments.add_argument("--iterations", type=int, default=2)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        base = Path(folder)
        for name, kind in kinds(base / "made").items():
            for trained, changes in (("LoRA", kind.adapted), ("full", kind.whole)):
                if name in given.only:
                    print(f"== {name}, {trained}", flush=True)
                    results[f"{name}, {trained}"] = measure(kind, changes, base / f"{name}-{trained}", given.iterations)
    save(given.out, "processes", results)


if __name__ == "__main__":
    main()
