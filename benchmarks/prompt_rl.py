"""PromptRL against Flow-GRPO alone at the same number of pictures: retention, and rollouts saved at equal reward.

    python -m benchmarks.prompt_rl train runs/prompt_rl            # every run that is not done yet
    python -m benchmarks.prompt_rl train runs/prompt_rl --seeds 0
    python -m benchmarks.prompt_rl report                          # the tables of docs/prompt_rl.md

Half of the prompts are captions that the embedded flow model knows, half are paraphrases that only the language model
does. All runs draw 96 pictures an iteration, with the settings of configs/diffusion/prompt_rl.yaml. What the report
needs of a finished run goes to benchmarks/results/prompt_rl.json, and `report` reads that alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.methods import complete, cost_of, reached
from benchmarks.prompt_rl_world import mixed
from genrl.config import load
from genrl.diffusion.config.schema import Config
from genrl.runtime.folder.run import Run, read_metrics, write_atomic

FOUND = RESULTS / "prompt_rl.json"
WORLD = "benchmarks/prompt_rl_world.py"
FLOW = "kernel: flow_sde, noise_level: 0.7, window: {size: 3, high: 5}, advantage_scale: group, clip_range: 5e-3"
ARMS = {
    "flow_grpo": (f"trainer={{algorithm: flow_grpo, {FLOW}}}",),
    "retained 3 of 12": (),
    "retained 0 of 12": ("trainer.retained=0",),
}
COMMON = (
    "rewards=[{name: 'configs/diffusion/prompt_rl_rewards.py:CaptionShapes'}, "
    f"{{name: '{WORLD}:OnCaptions', weight: 0}}, {{name: '{WORLD}:OnParaphrases', weight: 0}}, "
    "{name: 'configs/diffusion/prompt_rl_rewards.py:CaptionClip', weight: 0, args: {model: assets/tiny-clip}}]",
    *("iterations=10", "evaluation.every=5"),
)
NAMES = ("total", "OnCaptions", "OnParaphrases", "CaptionClip")
KINDS = ("eval", "eval_rewritten")


def train(folder: Path, seeds: Sequence[int]) -> None:
    """Make every run that is not there, and go on with those that were left."""
    files = [f"prompts.{split}={mixed(split, folder / f'{split}.jsonl')}" for split in ("train", "eval")]
    for seed in seeds:
        for arm, changes in ARMS.items():
            key = f"{arm}, seed {seed}"
            if key in stored():
                continue
            run = Run(folder / f"{arm.replace(' ', '-')}-{seed}")
            last = [f"seed={seed}", f"output={run.folder}", "checkpoint.keep=1", "trackers=[]"]
            complete(run, ["train", "configs/diffusion/prompt_rl.yaml", *changes, *COMMON, *files, *last])
            write_atomic(FOUND, json.dumps(stored() | {key: summary(run)}, indent=1, sort_keys=True) + "\n")


def stored() -> dict[str, Any]:
    """What was measured, by arm and seed."""
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


def summary(run: Run) -> dict[str, Any]:
    """Held-out figures over the pictures drawn for training, in thousands."""
    config, rows = load(run.config), read_metrics(run.metrics)
    assert isinstance(config, Config)
    each = config.sampling.prompts_per_iteration * config.sampling.group_size / 1000
    keys = [f"{kind}/{name}_mean" for kind in KINDS for name in NAMES]
    curves = {
        key: [(round(row["step"] * each, 3), round(row[key], 4)) for row in rows if row.get(key) is not None]
        for key in keys
    }
    cost = json.loads(cost_of(run).read_text())["cpu_s"] if cost_of(run).exists() else None
    return {"curves": {k: v for k, v in curves.items() if v}, "cpu_s": cost}


def report() -> str:
    """Ends, and the pictures that each run needs for what Flow-GRPO alone reaches."""
    runs = {arm: [run for key, run in sorted(stored().items()) if key.startswith(f"{arm},")] for arm in ARMS}
    lines = ["| | " + " | ".join(f"{kind}, {name}" for kind in KINDS for name in NAMES) + " |", "| --- " * 9 + "|"]
    for arm, found in runs.items():
        cells = [
            _ends([run["curves"][key] for run in found]) if key in found[0]["curves"] else "–"
            for key in (f"{kind}/{name}_mean" for kind in KINDS for name in NAMES)
        ]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| | thousand pictures until the best held-out total of Flow-GRPO alone, each seed |",
        "| --- | --- |",
    ]
    best = [max(value for _, value in run["curves"]["eval/total_mean"]) for run in runs["flow_grpo"]]
    for arm, found in runs.items():
        for kind in KINDS:
            if f"{kind}/total_mean" in found[0]["curves"]:
                curves = [run["curves"][f"{kind}/total_mean"] for run in found]  # of fewer seeds, maybe
                each = [0.0 if c[0][1] >= b else reached(c, b) for c, b in zip(curves, best)]  # noqa: B905
                told = ", ".join("never" if x is None else f"{x:.2f}" for x in each)
                lines.append(f"| {arm}, `{kind}` | {told} |")
    return "\n".join(lines)


def _ends(curves: Sequence[Sequence[Sequence[float]]]) -> str:
    last = [curve[-1][1] for curve in curves]
    spread = f" ± {stdev(last):.3f}" if len(last) > 1 else ""
    return f"{mean(curve[0][1] for curve in curves):.3f} → {mean(last):.3f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="make the runs")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    commands.add_parser("report", help="print the tables")
    given = parser.parse_args()
    if given.command == "train":
        train(given.folder, given.seeds)
    else:
        print(report())


if __name__ == "__main__":
    main()
