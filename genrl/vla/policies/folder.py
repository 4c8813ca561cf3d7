"""Policies on disk: LeRobot's published ones (see `genrl.vla.policies.lerobot`), and the embedded ones in the same
layout.

config.json                      "type", "input_features", "output_features", "normalization_mapping", settings
model.safetensors                the weights
policy_preprocessor.json         the normaliser's step, with the name of its statistics
policy_preprocessor_step_0_normalizer_processor.safetensors      "<feature>.<statistic>", e.g. "action.min"
policy_postprocessor.json, policy_postprocessor_step_0_unnormalizer_processor.safetensors      the same, back
first_steps/                     of DPPO: the policy that does the first denoising steps, a folder like this one, with
first_steps/sampler.json         "steps" and "ft_denoising_steps", of which the outer policy does the last
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from genrl.vla.policies.diffusion_mlp import DiffusionMLP, DiffusionMLPConfig
from genrl.vla.policies.encoder import MODES, Inputs
from genrl.vla.policies.lerobot import Adapt, existing, save_folder, write
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE, Statistics
from genrl.vla.policies.tiny_flow import TinyFlowConfig, TinyFlowVLA

if TYPE_CHECKING:
    from genrl.vla.policies.diffusion_policy import DiffusionPolicy
    from genrl.vla.policies.pi0 import PI0
    from genrl.vla.policies.smolvla import SmolVLA

    PublishedPolicy = PI0 | SmolVLA | DiffusionPolicy

EmbeddedPolicy = TinyFlowVLA | DiffusionMLP

FIRST_STEPS = "first_steps"
TYPES = ("tiny_flow_vla", "diffusion_mlp", "pi0", "pi05", "smolvla", "diffusion")
_FLOW, _DIFFUSION = "tiny_flow_vla", "diffusion_mlp"
_PROCESSORS = {"policy_preprocessor": "normalizer_processor", "policy_postprocessor": "unnormalizer_processor"}


def save_policy(policy: EmbeddedPolicy | PublishedPolicy, folder: Path) -> None:
    """Write the files into a folder, which is made; each appears under its name when it is complete."""
    if not isinstance(policy, EmbeddedPolicy):
        save_folder(folder, policy.folder, policy.layout, policy, policy.tokenizer)
        return
    folder.mkdir(parents=True, exist_ok=True)
    inputs, shapes = policy.config.inputs, _features(policy.config.inputs)
    features = shapes | {ACTION: {"type": "ACTION", "shape": [policy.action_dim]}}
    settings = dataclasses.asdict(policy.config)
    kept = {name: settings[name] for name in settings.keys() - {"inputs", "action_dim", "horizon"}}
    config = {
        "type": _FLOW if isinstance(policy, TinyFlowVLA) else _DIFFUSION,
        "input_features": shapes,
        "output_features": {ACTION: features[ACTION]},
        "normalization_mapping": MODES,
        "chunk_size": policy.horizon,
        "vocabulary": list(inputs.vocabulary),
    }
    weights = {name: value.detach().cpu().contiguous() for name, value in policy.state_dict().items()}
    stats = {f"{name}.{key}": value.cpu() for name, found in policy.stats.items() for key, value in found.items()}
    write(folder / "model.safetensors", weights)
    for processor, step in _PROCESSORS.items():
        state = f"{processor}_step_0_{step}.safetensors"
        how = {"eps": 1e-8, "features": features, "norm_map": MODES}
        write(folder / state, stats)
        steps = [{"registry_name": step, "config": how, "state_file": state}]
        write(folder / f"{processor}.json", {"name": processor, "steps": steps})
    write(folder / "config.json", config | kept)


def save_first_steps(policy: EmbeddedPolicy | PublishedPolicy, folder: Path, steps: int, trained: int) -> None:
    """Beside the policy of a folder, that which does all but the last `trained` of its denoising steps (DPPO)."""
    save_policy(policy, folder / FIRST_STEPS)
    write(folder / FIRST_STEPS / "sampler.json", {"steps": steps, "ft_denoising_steps": trained})


def load_first_steps(
    folder: Path, steps: int, trained: int, *, device: torch.device | str = "cpu"
) -> EmbeddedPolicy | PublishedPolicy | None:
    """What `save_first_steps` wrote; None where a folder has none.

    Raises ValueError where the policy of the folder was trained to do another part of the chain.
    """
    place = folder / FIRST_STEPS
    if not place.is_dir():
        return None
    told = json.loads(existing(place, "sampler.json").read_text())
    if (told["steps"], told["ft_denoising_steps"]) != (steps, trained):
        raise ValueError(
            f"{folder} does the last {told['ft_denoising_steps']} of {told['steps']} denoising steps, and "
            f"{place} the first ones; write sampler.steps: {told['steps']} and sampler.ft_denoising_steps: "
            f"{told['ft_denoising_steps']}, found {steps} and {trained}"
        )
    return load_policy(place, device=device)


def load_policy(
    folder: Path, *, device: torch.device | str = "cpu", adapt: Adapt | None = None
) -> EmbeddedPolicy | PublishedPolicy:
    """The policy in a folder, LeRobot's or that of `save_policy`, in evaluation mode. adapt: for LeRobot's.

    Raises FileNotFoundError for a file that is missing, and ValueError for another type of policy, another
    normalisation, or weights of other names or shapes.
    """
    config = json.loads(existing(folder, "config.json").read_text())
    kind = config.get("type")
    if kind not in TYPES:
        near = difflib.get_close_matches(str(kind), TYPES, n=1)
        hint = f"; the nearest one is {near[0]!r}" if near else ""
        raise ValueError(f"{folder}/config.json: type must be one of {list(TYPES)}, found {kind!r}{hint}")
    if kind not in (_FLOW, _DIFFUSION):
        return _load_published(kind, folder, device, adapt or Adapt())
    if adapt is not None:
        raise ValueError(f"{folder} holds an embedded policy, which is made with its heads: it takes no Adapt")
    if config["normalization_mapping"] != MODES:
        raise ValueError(
            f"{folder}/config.json: normalization_mapping must be {MODES}, found {config['normalization_mapping']}"
        )
    sizes = {name: int(feature["shape"][-1]) for name, feature in config["input_features"].items()}
    inputs = Inputs(
        state=sizes[STATE],
        vocabulary=tuple(config["vocabulary"]),
        environment=sizes.get(ENVIRONMENT, 0),
        image=sizes.get(IMAGE, 0),
    )
    action, horizon = int(config["output_features"][ACTION]["shape"][0]), int(config["chunk_size"])
    stats = _statistics(folder)
    policy: EmbeddedPolicy
    if kind == _FLOW:
        head = config["noise_head"]
        policy = TinyFlowVLA(TinyFlowConfig(inputs, action, horizon, int(config["critic"]), head), stats)
    else:
        steps = int(config["train_steps"])
        policy = DiffusionMLP(DiffusionMLPConfig(inputs, action, horizon, int(config["critic"]), steps), stats)
    weights = load_file(existing(folder, "model.safetensors"))
    try:
        policy.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder}/model.safetensors does not fit {folder}/config.json: {error}") from error
    return policy.to(device).eval()


def _load_published(kind: str, folder: Path, device: torch.device | str, adapt: Adapt) -> PublishedPolicy:
    match kind:
        case "smolvla":
            from genrl.vla.policies import smolvla

            return smolvla.load(folder, device, adapt)
        case "diffusion":
            from genrl.vla.policies import diffusion_policy

            return diffusion_policy.load(folder, device, adapt)
        case _:
            from genrl.vla.policies import pi0

            return pi0.load(folder, device, adapt)


def _features(inputs: Inputs) -> dict[str, dict[str, Any]]:
    """LeRobot's description: pictures channels first, as it hands them to a policy."""
    found: dict[str, dict[str, Any]] = {STATE: {"type": "STATE", "shape": [inputs.state]}}
    if inputs.environment:
        found[ENVIRONMENT] = {"type": "ENV", "shape": [inputs.environment]}
    if inputs.image:
        found[IMAGE] = {"type": "VISUAL", "shape": [3, inputs.image, inputs.image]}
    return found


def _statistics(folder: Path) -> Statistics:
    description = json.loads(existing(folder, "policy_preprocessor.json").read_text())
    states = [step["state_file"] for step in description["steps"] if step["registry_name"] == "normalizer_processor"]
    if len(states) != 1 or Path(states[0]).name != states[0]:
        raise ValueError(
            f"{folder}/policy_preprocessor.json must name one file of statistics beside it, found {states}"
        )
    stats: Statistics = {}
    for name, value in load_file(existing(folder, states[0])).items():
        feature, _, statistic = name.rpartition(".")
        stats.setdefault(feature, {})[statistic] = value
    return stats
