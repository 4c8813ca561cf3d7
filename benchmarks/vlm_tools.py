"""Vision-language agents with a tool, two seeds each: a table and a figure.

    python -m benchmarks.vlm_tools train runs/tools      # every method and seed that is not done yet
    python -m benchmarks.vlm_tools report                # the table of docs/vlm_tools.md, docs/img/vlm_tools.svg

A run is `genrl train configs/vlm/NAME.yaml` as it stands, in a process of its own with one thread. What the page needs
of a finished run goes to benchmarks/vlm_tools.json, and `report` reads that alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.methods import change, complete, cost_of, panels
from genrl.runtime.run import Run, read_metrics, write_atomic

METHODS = {"para_grpo": "PARA-GRPO", "vrag_rl": "VRAG-RL", "para_grpo_clips": "PARA-GRPO, clips", "conan": "Conan"}
FIGURE = Path("docs/img/vlm_tools.svg")
RESULTS = Path(__file__).with_suffix(".json")
CURVES = {"answers right": "eval/success_mean", "looked at the place": "eval/looked_mean", "reward": "eval/return_mean"}

Summary = dict[str, Any]


def summary(run: Run) -> Summary:
    """What the page says of one run; curves are over iterations. They begin before the first one, at 0."""
    rows = read_metrics(run.metrics)
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
    for row in rows:
        for name, key in CURVES.items():
            if (value := row.get(key)) is not None:
                curves[name].append((row["step"] * bool(curves[name]), round(value, 4)))
    blind = [round(row["eval/success_blind"], 3) for row in rows if "eval/success_blind" in row]
    cost = cost_of(run)
    return {
        "curves": curves,
        "blind": blind,
        "iterations": rows[-1]["step"],
        "cpu_s": round(json.loads(cost.read_text())["cpu_s"]) if cost.exists() else None,
    }


def stored() -> dict[str, Summary]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table(results: dict[str, list[Summary]]) -> str:
    lines = [
        f"| configuration | {' | '.join(CURVES)} | with black pictures | iterations | CPU seconds |",
        "| --- " * 7 + "|",
    ]
    for name, runs in results.items():
        blind, known = [run["blind"][-1] for run in runs], [run["cpu_s"] for run in runs if run["cpu_s"] is not None]
        cells = [f"`{name}.yaml`", *(change(runs, curve) for curve in CURVES), f"{mean(blind):.3f}"]
        cells += [str(runs[0]["iterations"]), f"{mean(known):.0f}" if known else "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="make the runs")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    runs.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    commands.add_parser("report", help="print the table, write the figure")
    given = parser.parse_args()
    if given.command == "train":
        for seed in given.seeds:
            for name in given.methods:
                run = Run(given.folder / f"{name}-{seed}")
                changes = [f"seed={seed}", f"output={run.folder}", "checkpoint.keep=1", "trackers=[]"]
                complete(run, ["train", f"configs/vlm/{name}.yaml", *changes])
                write_atomic(
                    RESULTS, json.dumps(stored() | {run.folder.name: summary(run)}, indent=1, sort_keys=True) + "\n"
                )
        return
    kept = stored()
    results = {name: [kept[key] for key in sorted(kept) if key.rpartition("-")[0] == name] for name in METHODS}
    results = {name: runs for name, runs in results.items() if runs}
    print(table(results))
    shown = [(METHODS[name], [run["curves"]["answers right"] for run in runs]) for name, runs in results.items()]
    write_atomic(FIGURE, panels(shown, 260, 170, 2, "held-out answers right over iterations"))


if __name__ == "__main__":
    main()
