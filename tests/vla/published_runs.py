"""Tiny published policies and OpenVLA-OFTs that see MiniTable, and runs of them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from genrl.vla.config.schema import VLAConfig
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import IMAGE
from tests.vla import openvla_folders, vla_runs
from tests.vla.groot_folders import groot_folder
from tests.vla.published import diffusion_folder, pi_folder, smol_folder

ALL: dict[str, Any] = {"train_expert_only": False, "freeze_vision_encoder": False}
"""What a folder says of which all weights are trained."""


def made(kind: str, folder: Path, values: int = 1, **settings: Any) -> Any:
    """A tiny policy that sees MiniTable's one camera and reads its three numbers. settings: of its config.json."""
    camera, side = ("camera0", 36) if kind == "diffusion" else ("base_0_rgb", 32)
    camera, picture = f"observation.images.{camera}", {"type": "VISUAL", "shape": [3, side, side]}
    features: dict[str, Any] = {"observation.state": {"type": "STATE", "shape": [3]}, camera: picture}
    MADE[kind](folder, input_features=features, **settings)
    numbers = ("observation.state", "action")
    stats = {name: {key: torch.zeros(3) + value for key, value in STATS.items()} for name in numbers}
    stats[camera] = {"mean": torch.full((3,), 0.5), "std": torch.full((3,), 0.25)}
    policy = load_policy(folder, adapt=Adapt(rename={IMAGE: camera}, stats=stats))
    return policy.with_heads(critic=values, noise_head="none", seed=0)


MADE: dict[str, Callable[..., Any]] = {"pi0": pi_folder, "pi05": partial(pi_folder, adaptive=True)}
MADE |= {"smolvla": smol_folder, "groot": groot_folder, "diffusion": partial(diffusion_folder, state=3)}
STATS = {"mean": 0.0, "std": 0.5, "min": -1.0, "max": 1.0, "q01": -1.0, "q99": 1.0}


def config(place: Path, kind: str, **changes: Any) -> VLAConfig:
    """Of a tiny PPO run in `place`; its policy, all of whose weights are trained, in place/base."""
    place.mkdir(exist_ok=True)
    if not (place / "base").is_dir():
        save_policy(made(kind, place / "plain", **ALL), place / "base")
    own: dict[str, Any] = {
        "policy": {"path": str(place / "base"), "freeze": "nothing"},
        "environment": {"num_envs": 4, "max_steps": 8, "chunk": 4},
        "trainer": {"epochs": 1, "minibatch": 4},
        "optimizer": {"lr": 1e-4},
    }
    return vla_runs.config(place, **vla_runs.merged(own, changes))


OFT: dict[str, Any] = {"chunk": 4, "centre_crop": False}
TOKEN = {"kind": "tokens", "temperature": 1.6}
SFT: dict[str, Any] = {
    "demonstrations": {"expert": 6},
    "trainer": {"algorithm": "sft", "steps_per_iteration": 2, "batch_size": 6},
}
PPO = {"algorithm": "ppo", "epochs": 1, "minibatch": 8, "critic_warmup": 0, "kl_stop": None}


def oft_config(place: Path, *, head: bool = False, **changes: Any) -> VLAConfig:
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
