"""The offline methods on the embedded table beside their own baselines, three seeds each.

    python -m benchmarks.vla_offline train runs/vla_offline          # every row and seed that is not done yet
    python -m benchmarks.vla_offline report                          # a table of all seeds; not made to its end yet

A run is `genrl train configs/vla/NAME.yaml` with the changes of its row, in a process of its own with one thread. What
the table needs of a finished run goes to benchmarks/results/vla_offline.json, and `report` reads that alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.common import RESULTS
from benchmarks.methods import run_genrl
from genrl.config import load
from genrl.runtime.folder.run import Run, read_metrics, write_atomic

FILE = RESULTS / "vla_offline.json"
SEEDS = (0, 1, 2)


class Row(NamedTuple):
    """A line of the table."""

    name: str
    config: str
    changes: tuple[str, ...] = ()
    figures: tuple[str, ...] = ("eval/success_mean",)


COST = ("eval/success_mean", "eval/cost_mean", "eval/violating")
ROWS = (
    Row("RL-VLM-F: plain cloning", "rl_vlm_f", ("trainer.temperature=0",)),
    Row("RL-VLM-F", "rl_vlm_f"),
    Row("DiWA: imitation in latents, and its dreams", "diwa"),
    Row("RL-100: rounds of imitation without the surrogate", "rl100", ("trainer.updates=1", "iterations=3")),
    Row("RL-100, its offline rounds", "rl100", ("iterations=3",)),
    Row("FISOR: plain cloning", "fisor", ("trainer.weighted=false",), COST),
    Row("FISOR", "fisor", (), COST),
)


def train(folder: Path) -> None:
    """Make every run that is not there."""
    for seed in SEEDS:
        for number, row in enumerate(ROWS):
            known, name = stored(), key(row)
            if seed in {one["seed"] for one in known.get(name, [])}:
                continue
            run = Run(folder / f"{number}-{seed}")
            shutil.rmtree(run.folder, ignore_errors=True)
            changes = [*row.changes, f"seed={seed}", f"output={run.folder}", "trackers=[]"]
            cpu_s = run_genrl(["train", f"configs/vla/{row.config}.yaml", *changes])
            found = [one for one in read_metrics(run.metrics) if "eval/success_mean" in one]
            curve = [{"step": one["step"], **{name: one[name] for name in row.figures}} for one in found]
            made = {"seed": seed, "curve": curve, "cpu_s": round(cpu_s, 1)}
            write_atomic(FILE, json.dumps(known | {name: [*known.get(name, []), made]}, indent=1) + "\n")


def key(row: Row) -> str:
    """What its runs are stored under: two rows may tell different evaluations of the same ones."""
    return " ".join((row.config, *row.changes))


def stored() -> dict[str, list[dict[str, Any]]]:
    """Key of a row -> its runs."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def report() -> str:
    """The first and the last evaluation of every row, each seed."""
    lines = ["| run | success before → after (each seed) | cost per episode | episodes with cost | CPU minutes |"]
    lines.append("| --- " * 5 + "|")
    for row in ROWS:
        runs = stored().get(key(row), [])
        if not runs:
            continue
        told = [_told([run["curve"][-1][name] for run in runs]) for name in row.figures]
        before = mean(run["curve"][0]["eval/success_mean"] for run in runs)
        episodes = load(Path(f"configs/vla/{row.config}.yaml")).evaluation.episodes
        minutes = mean(run["cpu_s"] for run in runs) / 60
        cells = [f"{before:.3f} → {told[0]}", *(told[1:] or ["", ""]), f"{minutes:.1f}"]
        lines.append(f"| {row.name} ({episodes} episodes) | {' | '.join(cells)} |")
    return "\n".join(lines)


def _told(values: list[float]) -> str:
    return f"**{mean(values):.3f}** ({', '.join(f'{value:.3f}' for value in values)})"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=("train", "report"))
    arguments.add_argument("folder", nargs="?", type=Path, default=Path("runs/vla_offline"))
    given = arguments.parse_args()
    if given.what == "train":
        train(given.folder)
    else:
        print(report())


if __name__ == "__main__":
    main()
