"""Policies on disk, in LeRobot's layout: its published ones, and others in the same files. An OpenVLA has its own
(`openvla_folder`).

config.json                      "type", by which the policy's class is found; its features and settings
model.safetensors                the weights
policy_preprocessor.json         the normaliser's step, with the name of its statistics
policy_preprocessor_step_0_normalizer_processor.safetensors      "<feature>.<statistic>", e.g. "action.min"
policy_postprocessor.json, policy_postprocessor_step_0_unnormalizer_processor.safetensors      the same, back
first_steps/                     of DPPO: the policy that does the first denoising steps, a folder like this one, with
first_steps/sampler.json         "steps" and "ft_denoising_steps", of which the outer policy does the last
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from genrl.config.plugins import find
from genrl.vla.config.names import POLICIES
from genrl.vla.policies.lerobot import Adapt, existing, write
from genrl.vla.policies.policy import Policy, missing

FIRST_STEPS = "first_steps"


def policy_class(name: str) -> Any:
    """The class of a policy by name. Raises ValueError for an unknown one, and one that lacks what policies need."""
    kind = find(name, POLICIES)
    if not isinstance(kind, type) or (lacks := missing(kind)):
        what = f"has no {', '.join(lacks)}" if isinstance(kind, type) else "is no class"
        raise ValueError(f"{name} {what}: genrl.vla.policies.policy says what a policy defines")
    return kind


def save_policy(policy: Policy, folder: Path) -> None:
    """Write the files into a folder, which is made; each appears under its name when it is complete."""
    policy.save(folder)


def load_policy(folder: Path, *, device: torch.device | str = "cpu", adapt: Adapt | None = None) -> Any:
    """The policy in a folder, in evaluation mode. adapt: for LeRobot's.

    Raises FileNotFoundError for a file that is missing, and ValueError for another type of policy, another
    normalisation, or weights of other names or shapes.
    """
    config = json.loads(existing(folder, "config.json").read_text())
    name = config.get("type", config.get("model_type"))
    try:
        kind = policy_class(str(name))
    except ValueError as error:
        raise ValueError(f"{folder}/config.json: type: {error}") from None
    return kind.load(folder, device, adapt)


def save_first_steps(policy: Policy, folder: Path, steps: int, first: int) -> None:
    """Save, beside the policy of a folder, that which does the `first` of its denoising steps (DPPO)."""
    save_policy(policy, folder / FIRST_STEPS)
    write(folder / FIRST_STEPS / "sampler.json", {"steps": steps, "ft_denoising_steps": steps - first})


def load_first_steps(folder: Path, steps: int, first: int, *, device: torch.device | str = "cpu") -> Any:
    """What `save_first_steps` wrote; None where a folder has none.

    Raises ValueError where the policy of the folder was trained to do another part of the chain.
    """
    place = folder / FIRST_STEPS
    if not place.is_dir():
        return None
    settings = json.loads(existing(place, "sampler.json").read_text())
    if (settings["steps"], settings["ft_denoising_steps"]) != (steps, steps - first):
        raise ValueError(
            f"{folder} does the last {settings['ft_denoising_steps']} of {settings['steps']} denoising steps, and "
            f"{place} the first ones; write sampler.steps: {settings['steps']} and sampler.ft_denoising_steps: "
            f"{settings['ft_denoising_steps']}, found {steps} and {steps - first}"
        )
    return load_policy(place, device=device)
