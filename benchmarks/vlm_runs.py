"""What the tables of vision-language runs share: `train` makes runs of configs/vlm and keeps what a page needs of each,
`report` reads that alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.methods import complete, cost_of
from genrl.runtime.run import Run, write_atomic

Summary = dict[str, Any]
Results = dict[str, list[Summary]]


def command(
    doc: str | None,
    file: Path,
    methods: Iterable[str],
    seeds: Sequence[int],
    summary: Callable[[Run], Summary],
    report: Callable[[Results], None],
) -> None:
    """The command line of a table. methods: names of files in configs/vlm. file: JSON of summaries by `method-seed`;
    `report` gets them by method, in the order of seeds, without methods that have none."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="make the runs that are not there, and go on with those that were left")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--methods", nargs="+", choices=[*methods], default=[*methods])
    runs.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    commands.add_parser("report", help="print the table, write the figure")
    given = parser.parse_args()
    if given.command == "train":
        for seed in given.seeds:
            for name in given.methods:
                run = Run(given.folder / f"{name}-{seed}")
                changes = [f"seed={seed}", f"output={run.folder}", "checkpoint.keep=1", "trackers=[]"]
                complete(run, ["train", f"configs/vlm/{name}.yaml", *changes])
                kept = stored(file) | {run.folder.name: summary(run)}
                write_atomic(file, json.dumps(kept, indent=1, sort_keys=True) + "\n")
        return
    kept = stored(file)
    results = {name: [kept[key] for key in sorted(kept) if key.rpartition("-")[0] == name] for name in methods}
    report({name: found for name, found in results.items() if found})


def stored(file: Path) -> dict[str, Summary]:
    return json.loads(file.read_text()) if file.exists() else {}


def cpu_seconds(run: Run) -> float | None:
    """Of the whole command; None where the run was interrupted."""
    cost = cost_of(run)
    return round(json.loads(cost.read_text())["cpu_s"], 1) if cost.exists() else None


def average(runs: Sequence[Summary], key: str, digits: int = 0) -> str:
    """Mean of what is known, or a dash."""
    known = [run[key] for run in runs if run[key] is not None]
    return f"{sum(known) / len(known):.{digits}f}" if known else "–"
