"""Prompt economy at equal cost of sampling: chosen prompts, and down-sampled groups, against all of them.

    python -m benchmarks.economy train runs/economy                       # every task, way and seed not done yet
    python -m benchmarks.economy train runs/economy --tasks answers --seeds 0
    python -m benchmarks.economy simulate                                 # the choice alone, without a model: seconds
    python -m benchmarks.economy report                                   # the tables of docs/economy.md

All ways sample as many answers (or pictures) of equally many prompts in each iteration, from the same pool of prompts.
Down-sampling trains on half of them, so that its update costs half. A run that is there is not made again. What the
table needs goes to benchmarks/results/economy.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.methods import complete
from benchmarks.vlm_runs import average, cpu_seconds, stored
from genrl.config.economy import Replay, Selection
from genrl.mdp.batches import prompt_indices
from genrl.runtime.folder.run import Run, read_metrics, write_atomic
from genrl.runtime.loop.economy import NOTHING, choose, looked_at, noted

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
WAYS = {
    "all": lambda task: [],
    "selection": lambda task: [f"economy.selection={{by: {BY[task]}}}"],
    "replay": lambda task: [f"economy.selection={{by: {BY[task]}, candidates: 1, replay: {{}}}}"],
    "keep": lambda task: [f"economy.keep={SIZE[task] // 2}"],
}


def summary(run: Run, task: str) -> dict[str, Any]:
    """What the table says of one run: means over iterations, and the curve of the held-out figure."""
    rows = read_metrics(run.metrics)
    trained = [row for row in rows if row["step"]]

    def over_iterations(key: str) -> float | None:
        known = [row[key] for row in trained if row.get(key) is not None]
        return round(mean(known), 4) if known else None

    keys = ("zero_std_ratio", "group_std_mean", "selection/known", "selection/error", "rollout/tokens_mean")
    keys += ("model_calls/sample", "model_calls/train", "timing/train_s")
    curve = [(row["step"], round(row[METRIC[task]], 4)) for row in rows if row.get(METRIC[task]) is not None]
    return {"curve": curve, "cpu_s": cpu_seconds(run), **{key: over_iterations(key) for key in keys}}


def train(folder: Path, tasks: list[str], ways: list[str], seeds: list[int]) -> None:
    for seed in seeds:
        for task in tasks:
            for way in ways:
                run = Run(folder / f"{task}-{way}-{seed}")
                if run.folder.name in stored(RESULTS):
                    continue
                changes = [*TASKS[task], *OFTEN, *WAYS[way](task), f"seed={seed}", f"output={run.folder}"]
                complete(run, ["train", *changes])
                kept = stored(RESULTS) | {run.folder.name: summary(run, task)}
                write_atomic(RESULTS, json.dumps(kept, indent=1, sort_keys=True) + "\n")


SIMULATED = {
    "all": None,
    "by success": Selection(by="success"),
    "by spread": Selection(by="spread"),
    "replay": Selection(by="success", candidates=1, replay=Replay()),
}


def idle_groups(settings: Selection | None, seed: int, drift: float) -> float:
    """Share of groups of 8 that all fail or all succeed, over 100 iterations of 16 of 256 prompts: their success rates
    are drawn from Beta(.4, .4), and their log-odds rise by `drift` in an iteration."""
    source, known, idle = random.Random(seed), NOTHING, []
    rates = [min(max(source.betavariate(0.4, 0.4), 1e-6), 1 - 1e-6) for _ in range(256)]
    for iteration in range(100):
        pool = prompt_indices(256, looked_at(settings, 16), seed=seed, iteration=iteration)
        chosen = choose(settings, pool, 16, known, iteration=iteration, seed=seed)
        now = [1 / (1 + (1 - rates[n]) / rates[n] * math.exp(-drift * iteration)) for n in chosen]
        won = torch.tensor([[float(source.random() < rate) for _ in range(8)] for rate in now])
        idle.append(float((won.std(1) == 0).double().mean()))
        if settings is not None:
            known, _ = noted(settings, known, chosen, won, iteration=iteration)
    return round(mean(idle), 4)


def simulate() -> None:
    found = {
        f"simulated-{way}-{drift}": [idle_groups(settings, seed, drift) for seed in range(3)]
        for way, settings in SIMULATED.items()
        for drift in (0.0, 0.03)
    }
    write_atomic(RESULTS, json.dumps(stored(RESULTS) | found, indent=1, sort_keys=True) + "\n")


def simulation(kept: Mapping[str, Any]) -> Iterator[str]:
    yield "| choice | groups without spread: rates stay | log-odds rise by .03 an iteration |"
    yield "| --- " * 3 + "|"
    for way in SIMULATED:
        runs = [kept[f"simulated-{way}-{drift}"] for drift in (0.0, 0.03)]
        yield f"| {way} | {' | '.join(f'{mean(run):.3f} ± {stdev(run):.3f}' for run in runs)} |"


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
            idle, cpu = mean(run["zero_std_ratio"] for run in runs), average(runs, "cpu_s")
            cells = [task, f"`{way}`", str(len(runs)), f"{runs[0]['curve'][0][1]:.3f} → {mean(ends):.3f}{spread}"]
            lines.append(f"| {' | '.join([*cells, f'{curve:.3f}', f'{idle:.2f}', cpu])} |")
    return "\n".join([*lines, "", *simulation(kept)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="make the runs that are not there")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    runs.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    runs.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    commands.add_parser("simulate", help="measure the choice alone")
    commands.add_parser("report", help="print the tables")
    given = parser.parse_args()
    if given.command == "train":
        train(given.folder, given.tasks, given.ways, given.seeds)
    elif given.command == "simulate":
        simulate()
    else:
        print(report())


if __name__ == "__main__":
    main()
