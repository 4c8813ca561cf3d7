"""Adv-GRPO's reward through DINO: does it carry a style over, and is a judge that is not trained on hacked?

    python -m benchmarks.adv_grpo train runs/adv_grpo --seeds 0 1 2  # every run that is not done yet
    python -m benchmarks.adv_grpo report                             # the tables of docs/adv_grpo.md

A run is `genrl train configs/diffusion/adv_grpo_style.yaml` with the changes of its row. All rows are one run until the
warm-up of the judge ends; then it is trained on beside the model, or not. What the tables need of a finished run goes
to benchmarks/results/adv_grpo.json, and `report` reads that alone; pictures are in samples/ of each run's folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.common import RESULTS
from genrl.config import load
from genrl.diffusion.train import train as train_run
from genrl.runtime.folder.run import Run, read_metrics, write_atomic

FILE = RESULTS / "adv_grpo.json"
CONFIG = "configs/diffusion/adv_grpo_style.yaml"
ROWS = {
    "trained beside the model": (),
    "frozen after its warm-up": ("trainer.adversary.schedule=alternate", "trainer.adversary.every=1"),
}
FIGURES = {
    "the judge's score": "eval/dino_adversary_mean",
    "circles (the style)": "eval/OneShape/shape_mean",
    "colours (asked for)": "eval/OneShape/colour_mean",
    "count (asked for)": "eval/OneShape/count_mean",
    "both, by the rule": "eval/OneShape_mean",
}
"""What a column tells, of the held-out prompts."""


def train(runs: Path, seeds: list[int]) -> None:
    """Make every run that is not there, and store what the tables need of each."""
    for seed in seeds:
        for row, changes in ROWS.items():
            known = stored()
            if seed in {one["seed"] for one in known.get(row, [])}:
                continue
            run = Run(runs / f"{row.split()[0]}-{seed}")
            config = load(Path(CONFIG), [*changes, f"seed={seed}", f"output={run.folder}", "trackers=[]"])
            if not run.metrics.exists() or read_metrics(run.metrics)[-1]["step"] < config.iterations:
                shutil.rmtree(run.folder, ignore_errors=True)
                train_run(config)
            rows = [one for one in read_metrics(run.metrics) if "eval/total_mean" in one]
            curve = [{"step": one["step"], **{key: one[key] for key in FIGURES.values()}} for one in rows]
            made = {"seed": seed, "curve": curve}
            write_atomic(FILE, json.dumps(known | {row: [*known.get(row, []), made]}, indent=1) + "\n")


def stored() -> dict[str, list[dict[str, Any]]]:
    """Row -> its runs."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def report() -> str:
    """Per row a line for the start and one for each evaluation: means over the seeds, and each seed of the last."""
    lines = [f"| the judge is | iteration | {' | '.join(FIGURES)} |", "| --- " * (2 + len(FIGURES)) + "|"]
    for row, found in stored().items():
        for place, first in enumerate(found[0]["curve"]):
            points = [run["curve"][place] for run in found]
            last = place == len(found[0]["curve"]) - 1
            cells = [told([point[key] for point in points], each=last) for key in FIGURES.values()]
            lines.append(f"| {row} | {first['step']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def told(values: list[float], *, each: bool) -> str:
    if not each or len(values) == 1:
        return f"{mean(values):.2f}"
    return f"**{mean(values):.2f}** ({', '.join(f'{value:.2f}' for value in values)})"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=("train", "report"))
    arguments.add_argument("folder", nargs="?", type=Path, default=Path("runs/adv_grpo"))
    arguments.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = arguments.parse_args()
    torch.set_num_threads(1)
    if given.what == "train":
        train(given.folder, given.seeds)
    else:
        print(report())


if __name__ == "__main__":
    main()
