"""Vision-language agents in the built-in room, several seeds each: a table and a figure.

    python -m benchmarks.vlm_agents train runs/agents      # every method and seed that is not done yet
    python -m benchmarks.vlm_agents report                 # the table of docs/vlm_agents.md, docs/img/vlm_agents.svg

A run is `genrl train configs/vlm/NAME.yaml` as it stands, in a process of its own with one thread. What the page needs
of a finished run goes to benchmarks/vlm_agents.json, and `report` reads that alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.methods import change, complete, cost_of, panels
from genrl.runtime.run import Run, read_metrics, write_atomic

METHODS = {"vl_dac": "VL-DAC", "poad": "POAD", "grid_grpo": "GRPO over episodes"}
SEEDS = {"vl_dac": (0, 1, 2), "poad": (0, 1, 2), "grid_grpo": (0, 1)}
FIGURE = Path("docs/img/vlm_agents.svg")
RESULTS = Path(__file__).with_suffix(".json")

Summary = dict[str, Any]


def train(folder: Path, methods: list[str]) -> None:
    """Make every run that is not there, and go on with those that were left."""
    for name in methods:
        for seed in SEEDS[name]:
            run = Run(folder / f"{name}-{seed}")
            changes = [f"seed={seed}", f"output={run.folder}", "checkpoint.keep=1", "trackers=[]"]
            complete(run, ["train", f"configs/vlm/{name}.yaml", *changes])
            kept = stored()
            kept[f"{name}-{seed}"] = summary(run)
            write_atomic(RESULTS, json.dumps(kept, indent=1, sort_keys=True) + "\n")


def summary(run: Run) -> Summary:
    """What the page says of one run; curves are over thousands of steps in the environment."""
    rows, steps = read_metrics(run.metrics), 0.0
    curves: dict[str, list[tuple[float, float]]] = {"success": [], "blind": []}
    for row in rows:
        steps = row.get("rollout/env_steps", 0.0) / 1000
        for name, key in (("success", "eval/success_mean"), ("blind", "eval/success_blind")):
            if (value := row.get(key)) is not None:
                curves[name].append((round(steps, 2), round(value, 4)))
    explained = [row["critic/explained_variance"] for row in rows[-5:] if "critic/explained_variance" in row]
    return {
        "curves": curves,
        "iterations": rows[-1]["step"],
        "thousand_steps": round(steps, 1),
        "explained": round(mean(explained), 3) if explained else None,
        "cpu_s": round(json.loads(cost_of(run).read_text())["cpu_s"], 1) if cost_of(run).exists() else None,
    }


def stored() -> dict[str, Summary]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table(results: dict[str, list[Summary]]) -> str:
    lines = [
        "| configuration | success, start → end ± sd (each seed) | with black pictures | iterations | thousand steps "
        "| explained variance of the critic | CPU seconds |",
        "| --- " * 7 + "|",
    ]
    for name, runs in results.items():
        blind = [change(runs, "blind").partition(" ±")[0].replace("*", "")]
        known, explained = ([run[key] for run in runs if run[key] is not None] for key in ("cpu_s", "explained"))
        cells = [
            f"`{name}.yaml`: {METHODS[name]}",
            change(runs, "success"),
            *blind,
            str(runs[0]["iterations"]),
            f"{mean(run['thousand_steps'] for run in runs):.0f}",
            f"{mean(explained):.2f}" if explained else "–",
            f"{mean(known):.0f}" if known else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="make the runs")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    commands.add_parser("report", help="print the table, write the figure")
    given = parser.parse_args()
    if given.command == "train":
        train(given.folder, given.methods)
        return
    kept = stored()
    results = {name: [kept[key] for key in sorted(kept) if key.rpartition("-")[0] == name] for name in METHODS}
    results = {name: runs for name, runs in results.items() if runs}
    print(table(results))
    shown = [(METHODS[name], [run["curves"]["success"] for run in runs]) for name, runs in results.items()]
    write_atomic(FIGURE, panels(shown, 260, 170, 3, "success in held-out rooms over thousands of steps"))


if __name__ == "__main__":
    main()
