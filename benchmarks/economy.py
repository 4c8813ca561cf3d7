"""Prompt economy at equal cost of sampling: chosen prompts, and down-sampled groups, against all of them.

    python -m benchmarks.economy train runs/economy                       # every task, way and seed not done yet
    python -m benchmarks.economy train runs/economy --tasks answers --seeds 0
    python -m benchmarks.economy report                                   # the table of docs/economy.md

All ways sample as many answers (or pictures) of equally many prompts in each iteration, from the same pool of prompts.
Down-sampling trains on half of them, so that its update costs half. A run that is there is not made again. What the
table needs goes to benchmarks/results/economy.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.vlm_runs import stored
from genrl.config import load
from genrl.diffusion import train as pictures
from genrl.runtime.run import Run, read_metrics, write_atomic
from genrl.vlm import train as answers

RESULTS = Path("benchmarks/results/economy.json")
OFTEN = ["checkpoint.every=1000", "checkpoint.keep=1", "trackers=[]"]
TASKS = {
    "answers": [
        "configs/vlm/grpo.yaml",
        *("task.rows=256", "iterations=60", "evaluation.every=20", "evaluation.blind=false"),
    ],
    "pictures": [
        "configs/quickstart.yaml",
        *("sampling.prompts_per_iteration=4", "sampling.group_size=8", "sampling.batch_size=8"),
        *("iterations=16", "evaluation.every=16", "evaluation.num_prompts=64", "evaluation.group_size=1"),
    ],
}
"""Configuration and changes: shapes in pictures are counted by a language model, and drawn."""
BY = {"answers": "success", "pictures": "spread"}
METRIC = {"answers": "eval/accuracy_mean", "pictures": "eval/shapes_mean"}
SIZE = {"answers": 8, "pictures": 8}
TRAIN: dict[str, Any] = {"answers": answers.train, "pictures": pictures.train}
WAYS = {
    "all": lambda task: [],
    "selection": lambda task: [f"economy.selection={{by: {BY[task]}}}"],
    "replay": lambda task: [f"economy.selection={{by: {BY[task]}, candidates: 1, replay: {{}}}}"],
    "keep": lambda task: [f"economy.keep={SIZE[task] // 2}"],
}


def summary(run: Run, task: str, cpu_s: float) -> dict[str, Any]:
    """What the table says of one run: means over iterations, and the curve of the held-out figure."""
    rows = read_metrics(run.metrics)
    trained = [row for row in rows if row["step"]]

    def average(key: str) -> float | None:
        known = [row[key] for row in trained if row.get(key) is not None]
        return round(mean(known), 4) if known else None

    keys = ("zero_std_ratio", "group_std_mean", "selection/known", "selection/error", "rollout/tokens_mean")
    keys += ("model_calls/sample", "model_calls/train", "timing/train_s")
    curve = [(row["step"], round(row[METRIC[task]], 4)) for row in rows if row.get(METRIC[task]) is not None]
    return {"curve": curve, "cpu_s": round(cpu_s, 1), **{key: average(key) for key in keys}}


def train(folder: Path, tasks: list[str], ways: list[str], seeds: list[int]) -> None:
    for seed in seeds:
        for task in tasks:
            for way in ways:
                run = Run(folder / f"{task}-{way}-{seed}")
                if run.folder.name in stored(RESULTS):
                    continue
                file, *changes = TASKS[task]
                config = load(Path(file), [*changes, *OFTEN, *WAYS[way](task), f"seed={seed}", f"output={run.folder}"])
                started = time.process_time()
                TRAIN[task](config)
                kept = stored(RESULTS) | {run.folder.name: summary(run, task, time.process_time() - started)}
                write_atomic(RESULTS, json.dumps(kept, indent=1, sort_keys=True) + "\n")


def report() -> str:
    lines = [
        "| task | way | seeds | held-out, before → end | mean of the curve | groups without spread | CPU seconds |"
    ]
    lines.append("| --- " * 7 + "|")
    kept = stored(RESULTS)
    for task in TASKS:
        for way in WAYS:
            runs = [run for name, run in sorted(kept.items()) if name.rpartition("-")[0] == f"{task}-{way}"]
            if not runs:
                continue
            ends = [run["curve"][-1][1] for run in runs]
            spread = f" ± {stdev(ends):.3f}" if len(ends) > 1 else ""
            curve = mean(value for run in runs for _, value in run["curve"][1:])
            idle, cpu = mean(run["zero_std_ratio"] for run in runs), mean(run["cpu_s"] for run in runs)
            cells = [task, f"`{way}`", str(len(runs)), f"{runs[0]['curve'][0][1]:.3f} → {mean(ends):.3f}{spread}"]
            lines.append(f"| {' | '.join([*cells, f'{curve:.3f}', f'{idle:.2f}', f'{cpu:.0f}'])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="make the runs that are not there")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    runs.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    runs.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    commands.add_parser("report", help="print the table")
    given = parser.parse_args()
    if given.command == "train":
        train(given.folder, given.tasks, given.ways, given.seeds)
    else:
        print(report())


if __name__ == "__main__":
    main()
