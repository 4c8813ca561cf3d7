"""Runs of tiny OpenVLA-OFTs that see MiniTable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from genrl.config import VLAConfig, load
from tests.vla import openvla_folders

OFT: dict[str, Any] = {"chunk": 4, "centre_crop": False}
TOKEN = {"kind": "tokens", "temperature": 1.6}
SFT: dict[str, Any] = {
    "demonstrations": {"expert": 6},
    "trainer": {"algorithm": "sft", "steps_per_iteration": 2, "batch_size": 6},
}
PPO = {"algorithm": "ppo", "epochs": 1, "minibatch": 8, "critic_warmup": 0, "kl_stop": None}
GRPO = {"algorithm": "grpo", "level": "element", "clip_range_high": 0.28, "epochs": 1, "minibatch": 8}


def config(place: Path, *, head: bool = False, **changes: Any) -> VLAConfig:
    """Of a tiny run in `place`, by PPO on tokens; its policy in place/base."""
    if not (place / "base").is_dir():
        openvla_folders.write(place / "base", head=head, proprio=True)
    tree: dict[str, Any] = {
        "policy": {"path": str(place / "base"), "freeze": "nothing", "oft": OFT},
        "environment": {"name": "minitable", "tasks": ["touch"], "num_envs": 8, "max_steps": 8},
        "sampler": {"kind": "regression"} if head else TOKEN,
        "trainer": PPO,
        "optimizer": {"lr": 1e-3},
        "evaluation": {"every": 0, "episodes": 8, "videos": 0},
        "checkpoint": {"every": 1},
        "trackers": [],
        "iterations": 1,
        "output": str(place / "run"),
    }
    for section, change in changes.items():
        old = tree.get(section)
        tree[section] = {**old, **change} if isinstance(old, dict) and "algorithm" not in change else change
    path = place / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    found = load(path)
    assert isinstance(found, VLAConfig)
    return found
