"""A tiny OpenVLA-OFT in the published format learns on MiniTable: imitated by action tokens, then reinforced by GRPO.

    python -m benchmarks.openvla_table [--seeds 0 1 2] [--task "touch the red block"]

Its weights are random before: two vision transformers of two blocks, a Llama of two layers, chunks of four actions. It
imitates 1000 episodes of the expert once, in 600 steps, and is reinforced from there with each seed. Evaluation takes
the likeliest tokens. Writes openvla_table.json.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from benchmarks.common import parser, save
from genrl.config import load
from genrl.runtime.folder.run import read_metrics
from genrl.vla.train import train
from tests.vla import openvla_folders

SIZES = SimpleNamespace(**{**vars(openvla_folders.TINY), "width": 64, "mlp": 128})
PLAIN = {"mean": [232 / 255, 226 / 255, 214 / 255], "std": [0.1] * 3}
"""Of the table's colour, so that what lies on it stands out."""


def trained(place: Path, name: str, tree: dict[str, Any]) -> dict[str, Any]:
    """What a run did: its evaluations as [iteration, success], seconds of the processor and in all."""
    common = {"environment": {"name": "minitable", "max_steps": 16}, "trackers": [], "output": str(place / name)}
    for section, value in common.items():
        tree[section] = {**value, **tree[section]} if isinstance(value, dict) else value
    (place / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    spent, begun = time.process_time(), time.perf_counter()
    train(load(place / f"{name}.yaml"))
    rows = read_metrics(place / name / "metrics.jsonl")
    success = [[row["step"], row["eval/success_mean"]] for row in rows if "eval/success_mean" in row]
    seconds = {"cpu_s": time.process_time() - spent, "wall_s": time.perf_counter() - begun}
    config = {section: value for section, value in tree.items() if section not in ("policy", "output")}  # no paths
    return {"success": success, **seconds, "config": config}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of GRPO; default: 0 1 2")
    made.add_argument("--task", default="touch the red block", help="the instruction; default: touch the red block")
    given = made.parse_args()
    evaluation = {"every": 4, "episodes": 256, "videos": 0}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        openvla_folders.write(place / "base", sizes=SIZES, proprio=True)
        (place / "base" / "preprocessor_config.json").write_text(json.dumps({"tvf_normalize_params": [PLAIN, PLAIN]}))
        oft = {"chunk": 4, "centre_crop": False}
        imitation = {
            "policy": {"path": str(place / "base"), "freeze": "nothing", "oft": oft},
            "environment": {"tasks": [given.task], "num_envs": 128},
            "sampler": {"kind": "tokens"},
            "demonstrations": {"expert": 1000},
            "trainer": {"algorithm": "sft", "steps_per_iteration": 50, "batch_size": 64},
            "optimizer": {"lr": 2e-3, "schedule": "cosine"},
            "evaluation": evaluation,
            "iterations": 12,
        }
        results = {"sft": trained(place, "sft", imitation)}
        for seed in given.seeds:
            reinforcement = {
                "policy": {"path": str(place / "sft")},
                "environment": {"tasks": [given.task], "num_envs": 256, "group_size": 8},
                "sampler": {"kind": "tokens"},
                "trainer": {
                    "algorithm": "grpo", "level": "element", "clip_range": [0.2, 0.28], "minibatch": 256, "epochs": 2,
                },
                "optimizer": {"lr": 3e-4},
                "evaluation": {**evaluation, "every": 10},
                "iterations": 30,
                "seed": seed,
            }  # fmt: skip
            results[f"grpo, seed {seed}"] = trained(place, f"grpo-{seed}", reinforcement)
    for name, run in results.items():
        print(name, *(f"{step}: {rate:.3f}" for step, rate in run["success"]), f"{run['cpu_s']:.0f} CPU s")
    save(given.out, "openvla_table", results)


if __name__ == "__main__":
    main()
