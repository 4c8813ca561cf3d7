"""PRDP and DDPO on 10,000 generated prompts, three seeds each (docs/prdp.md).

    python -m benchmarks.many_prompts train runs/many_prompts               # every run that is not done yet
    python -m benchmarks.many_prompts report                                # the table of docs/prdp.md

Both train the embedded flow model on captions of its world, 1,390 of shapes and 8,610 of signs (there are no more of
shapes), so that DDPO hardly ever meets a prompt again and scales over the batch, as its code does. Pictures, steps,
learning rate and model calls in sampling are equal. So PRDP, with groups of 8, meets 960 prompts, DDPO 7,680.
A run is `genrl train` in a process of its own with one thread; what the table needs of it goes to
benchmarks/results/many_prompts.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.image_tokens import cell
from benchmarks.methods import complete
from benchmarks.vlm_runs import cpu_seconds, stored
from genrl.playground.shapes import caption, sample_scene
from genrl.runtime.folder.run import Run, read_metrics, write_atomic

RESULTS = Path(__file__).parent / "results" / "many_prompts.json"
SEEDS = (0, 1, 2)
PROMPTS = 10_000
COMMON = (
    "model={path: assets/tiny-t2i}",
    "rewards=[{name: clipscore, args: {model: assets/tiny-clip}}]",
    "sampling.pipeline_args={max_sequence_length: 2}",
    *("trainer.kernel=flow_sde", "trainer.noise_level=0.7"),
    *("iterations=80", "evaluation.every=20"),
)
METHODS = {"prdp": ("trainer.beta=0.3",), "ddpo": ()}


def captions(count: int) -> list[str]:
    """So many different captions of the world, always the same."""
    rng = np.random.default_rng(0)
    found: dict[str, None] = {}
    while len(found) < count:
        found[caption(sample_scene(rng))] = None
    return list(found)


def train(folder: Path) -> None:
    """Make every run that is not there, and go on with those that were left."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "captions.txt"
    if not prompts.exists():
        write_atomic(prompts, "".join(f"{text}\n" for text in captions(PROMPTS)))
    for seed in SEEDS:
        for method, changes in METHODS.items():
            run = Run(folder / f"{method}-{seed}")
            if run.folder.name in stored(RESULTS):
                continue
            own = [
                f"prompts.train={prompts}",
                f"seed={seed}",
                f"output={run.folder}",
                "checkpoint.keep=1",
                "trackers=[]",
            ]
            complete(run, ["train", f"configs/diffusion/{method}.yaml", *COMMON, *changes, *own])
            rows = read_metrics(run.metrics)
            found = {"eval": curve(rows, "eval/clipscore_mean"), "own": curve(rows, "reward/clipscore_mean")}
            kept = stored(RESULTS) | {run.folder.name: {**found, "cpu_s": cpu_seconds(run)}}
            write_atomic(RESULTS, json.dumps(kept, sort_keys=True).replace("}, ", "},\n ") + "\n")


def curve(rows: list[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    return [(row["step"], round(row[metric], 4)) for row in rows if row.get(metric) is not None]


def report() -> str:
    """A row for each method: the mean over seeds at every evaluation, how far the last is below the best, and the mean
    score of the pictures it trained on, in the first and the last ten iterations."""
    results = stored(RESULTS)
    lines = []
    for method in METHODS:
        own = [[value for _, value in results[key]["own"]] for seed in SEEDS if (key := f"{method}-{seed}") in results]
        if not own:
            continue
        curves = [results[key]["eval"] for seed in SEEDS if (key := f"{method}-{seed}") in results]
        if not lines:
            steps = [f"{step}" for step, _ in curves[0]]
            lines += [
                f"| method | {' | '.join(steps)} | best minus last, each seed | own pictures, first ten iterations "
                "| last ten | seeds |",
                "| --- " * (len(steps) + 5) + "|",
            ]
        values = [[value for _, value in points] for points in curves]
        fall = ", ".join(f"{max(one) - one[-1]:.3f}" for one in values)
        ends = [cell([mean(one[part]) for one in own]) for part in (slice(10), slice(-10, None))]
        cells = [method.upper(), *map(cell, zip(*values, strict=True)), fall, *ends, str(len(curves))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="make the runs that are not there, and go on with those that were left")
    runs.add_argument("folder", type=Path)
    commands.add_parser("report", help="print the table")
    given = parser.parse_args()
    if given.command == "train":
        train(given.folder)
    else:
        print(report())


if __name__ == "__main__":
    main()
