"""What the tables of vision-language runs share: `train` makes runs of configs/vlm and keeps what a page needs of each,
`report` reads that alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.methods import complete, cost_of
from genrl.runtime.folder.run import Run, write_atomic

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
    given = _arguments(doc, "methods", methods, seeds)
    if given.command == "train":
        for seed in given.seeds:
            for name in given.chosen:
                run = Run(given.folder / f"{name}-{seed}")
                complete(run, ["train", f"configs/vlm/{name}.yaml", *_common(run, seed)])
                kept = stored(file) | {run.folder.name: summary(run)}
                write_atomic(file, json.dumps(kept, indent=1, sort_keys=True) + "\n")
        return
    kept = stored(file)
    results = {name: [kept[key] for key in sorted(kept) if key.rpartition("-")[0] == name] for name in methods}
    report({name: found for name, found in results.items() if found})


def situations(
    doc: str | None,
    file: Path,
    option: str,
    names: Iterable[str],
    seeds: Sequence[int],
    plan: Callable[[str, Path], Iterable[tuple[str, str, Sequence[str]]]],
    summary: Callable[[Run, str], Summary],
    page: Callable[[dict[str, Summary]], str],
) -> None:
    """The command line of a page on methods in situations, which `--option` chooses by their names.

    plan: of a situation and the folder of the runs, its methods, each with a file in configs/vlm and its changes. file:
    JSON of summaries by `situation-method-seed`, of which `report` prints the page.
    """
    given = _arguments(doc, option, names, seeds)
    if given.command == "report":
        print(page(stored(file)).rstrip("\n"))
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        for name in given.chosen:
            for method, config, changes in plan(name, given.folder):
                run = Run(given.folder / f"{name}-{method}-{seed}")
                if run.folder.name in stored(file):
                    continue
                complete(run, ["train", f"configs/vlm/{config}.yaml", *changes, *_common(run, seed)])
                kept = stored(file) | {run.folder.name: summary(run, name)}
                write_atomic(file, json.dumps(kept, sort_keys=True).replace("}, ", "},\n ") + "\n")


def _arguments(doc: str | None, option: str, names: Iterable[str], seeds: Sequence[int]) -> argparse.Namespace:
    """command; of `train` folder, chosen (of the names) and seeds."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="make the runs that are not there, and go on with those that were left")
    runs.add_argument("folder", type=Path)
    runs.add_argument(f"--{option}", dest="chosen", nargs="+", choices=[*names], default=[*names])
    runs.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    commands.add_parser("report", help="print the tables, write the figures")
    return parser.parse_args()


def _common(run: Run, seed: int) -> list[str]:
    return [f"seed={seed}", f"output={run.folder}", "checkpoint.keep=1", "trackers=[]"]


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
