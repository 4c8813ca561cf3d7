"""Weak scaling: the same pictures per process by 1, 2 and 4 processes, end to end.

    python -m benchmarks.scaling [configs/quickstart.yaml] [--processes 1 2 4] [--iterations 4]

`prompts_per_iteration` grows with the number of processes, each of which has one thread (or one GPU). Prints seconds of
an iteration (the median after the first), pictures per second and its share of what as many lone processes would make,
and writes benchmarks/results/scaling.json. Processes beyond the cores or GPUs at hand share them, and say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.methods import run_genrl
from genrl.config import Config, load
from genrl.runtime.run import Run, read_metrics


def measure(path: str, processes: int, iterations: int) -> dict[str, float]:
    """Of one run, loading aside."""
    config = load(path)
    assert isinstance(config, Config)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run")
        changes = [
            f"sampling.prompts_per_iteration={config.sampling.prompts_per_iteration * processes}",
            f"iterations={iterations}",
            f"output={run.folder}",
            *("evaluation.every=0", "checkpoint.every=1000000", "trackers=[]"),
        ]
        run_genrl(["train", path, *changes, "--nproc", str(processes)])
        seconds = median(row["timing/iteration_s"] for row in read_metrics(run.metrics)[1:])
    return {"iteration_s": seconds, "pictures_per_s": config.sampling.images_per_iteration * processes / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--iterations", type=int, default=4)
    given = parser.parse_args()
    found = {count: measure(given.config, count, given.iterations) for count in given.processes}
    alone = found[given.processes[0]]["pictures_per_s"] / given.processes[0]
    print(
        f"{os.cpu_count()} cores\n| processes | iteration, s | pictures per s | efficiency |\n| --- | --- | --- | --- |"
    )
    for count, row in found.items():
        row["efficiency"] = row["pictures_per_s"] / (alone * count)
        print(f"| {count} | {row['iteration_s']:.2f} | {row['pictures_per_s']:.1f} | {row['efficiency']:.2f} |")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "scaling.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
