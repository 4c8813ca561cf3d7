"""Runs of tiny OpenVLA-OFTs that see MiniTable."""

from pathlib import Path
from typing import Any

from genrl.vla.config.schema import VLAConfig
from tests.vla import openvla_folders, vla_runs

OFT: dict[str, Any] = {"chunk": 4, "centre_crop": False}
TOKEN = {"kind": "tokens", "temperature": 1.6}
SFT: dict[str, Any] = {
    "demonstrations": {"expert": 6},
    "trainer": {"algorithm": "sft", "steps_per_iteration": 2, "batch_size": 6},
}
PPO = {"algorithm": "ppo", "epochs": 1, "minibatch": 8, "critic_warmup": 0, "kl_stop": None}
GRPO = {"algorithm": "grpo", "level": "element", "clip_range": [0.2, 0.28], "epochs": 1, "minibatch": 8}


def config(place: Path, *, head: bool = False, **changes: Any) -> VLAConfig:
    """Of a tiny run in `place`, by PPO on tokens; its policy in place/base."""
    if not (place / "base").is_dir():
        openvla_folders.write(place / "base", head=head, proprio=True)
    own: dict[str, Any] = {
        "policy": {"path": str(place / "base"), "freeze": "nothing", "oft": OFT},
        "environment": {"max_steps": 8},
        "sampler": {"kind": "regression"} if head else TOKEN,
        "trainer": PPO,
    }
    return vla_runs.config(place, **vla_runs.merged(own, changes))
