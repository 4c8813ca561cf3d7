"""LeRobot's policy folders, read and written back: configuration, processors, statistics, weights by key, tokenizer.

config.json                                    "type", features, normalization_mapping, the policy's settings
model.safetensors                              the weights, by the names of LeRobot's modules
policy_preprocessor.json, policy_postprocessor.json      steps; a normaliser names the file of its statistics
tokenizer/                                     optional here: the tokenizer that the preprocessor names, with no hub
genrl_heads.safetensors                        optional: critic and noise head, which LeRobot's policies do not have

What a policy does not use, it keeps: a folder that is loaded and saved has the keys, tensors, dtypes and steps it had.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from genrl.vla.policies.policy import Statistics

HEADS = ("value_head.", "noise_head.")
PROCESSORS = ("policy_preprocessor", "policy_postprocessor")
NORMALISERS = ("normalizer_processor", "unnormalizer_processor")
GROOT_PACK = "groot_n1_7_pack_inputs_v1"
GROOT_UNPACK, GROOT_DECODE = "groot_action_unpack_unnormalize_v2", "groot_n1_7_action_decode_v1"
"""GR00T's steps that normalise: its inputs, and its actions by statistics of a data set or of its base model."""
_KNOWN_STEPS = {
    *NORMALISERS,
    "rename_observations_processor",
    "to_batch_processor",
    "device_processor",
    "tokenizer_processor",
    "pi0_new_line_processor",
    "smolvla_new_line_processor",
    "pi05_prepare_state_tokenizer_processor_step",
    GROOT_PACK,
    "groot_n1_7_vlm_encode_v1",
    GROOT_UNPACK,
    GROOT_DECODE,
}


@dataclass(frozen=True)
class Adapt:
    """What a published policy gets beside its folder.

    rename: LeRobot's rename_map, name in the environment -> name in the policy; where it names pictures, those it does
    not name are empty cameras. stats: those of another data set, which a base model needs. padded_state: pi0.5 reads
    its state padded to the width of the model, as LeRobot 0.4 wrote it. oft: of an OpenVLA, what `policy.oft` says. All
    are written with the policy.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    stats: Statistics | None = None
    padded_state: bool | None = None
    oft: Mapping[str, Any] | None = None


PROMPT = "prompt.json"
"""How pi0.5's prompt is written, where that is not as openpi writes it; no file of LeRobot's."""


@dataclass
class Folder:
    """A folder as read. processors: the two descriptions by name; states: tensors, and beside: JSON, by file name."""

    path: Path
    config: dict[str, Any]
    processors: dict[str, dict[str, Any]]
    states: dict[str, dict[str, Tensor]]
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)

    def settings_of(self, kind: type[Any]) -> dict[str, Any]:
        """The fields of a dataclass that config.json has."""
        return {name: self.config[name] for name in kind.__dataclass_fields__ if name in self.config}

    def step(self, name: str) -> dict[str, Any]:
        """The configuration of a step of the preprocessor, {} where there is none."""
        steps = self.processors["policy_preprocessor"]["steps"]
        return next((step.get("config", {}) for step in steps if step["registry_name"] == name), {})


@dataclass
class Layout:
    """Where a policy's tensors are in model.safetensors. keys: file key -> own name; unused: tensors kept as found."""

    keys: dict[str, str]
    dtypes: dict[str, torch.dtype]
    unused: dict[str, Tensor]
    metadata: dict[str, str]


def read_folder(path: Path, adapt: Adapt | None) -> Folder:
    """Raises FileNotFoundError for a missing file, ValueError for a step of a processor that is not known here."""
    config = json.loads(existing(path, "config.json").read_text())
    if adapt is not None and adapt.oft is not None:
        raise ValueError(f"{path}/config.json: policy.oft is of an OpenVLA, and this is {config['type']}; leave it out")
    processors = {name: json.loads(existing(path, f"{name}.json").read_text()) for name in PROCESSORS}
    states: dict[str, dict[str, Tensor]] = {}
    for name, description in processors.items():
        for step in description["steps"]:
            kind, settings = step.get("registry_name"), step.get("config", {})
            if kind not in _KNOWN_STEPS and settings.get("enabled", True):
                near = difflib.get_close_matches(str(kind), sorted(_KNOWN_STEPS), n=1)
                hint = f"; the nearest known one is {near[0]!r}" if near else ""
                raise ValueError(
                    f"{path}/{name}.json: the step {kind!r} is not known here, and leaving it out would "
                    f"change the policy{hint}"
                )
            if "state_file" in step:
                # `save_folder` writes under this name: a published folder must not name a file outside of it.
                if Path(step["state_file"]).name != step["state_file"]:
                    raise ValueError(f"{path}/{name}.json: state_file must lie beside it, found {step['state_file']!r}")
                states[step["state_file"]] = load_file(existing(path, step["state_file"]))
    folder = Folder(path, config, processors, states)
    if adapt is not None and adapt.rename:
        _rename(folder, adapt.rename)
    if adapt is not None and adapt.stats is not None:
        _replace_statistics(folder, adapt.stats)
    if adapt is not None and adapt.padded_state is not None:
        if config["type"] != "pi05":
            raise ValueError(f"{path}/config.json: policy.padded_state is of type pi05, and this is {config['type']}")
        folder.beside[PROMPT] = {"padded_state": adapt.padded_state}
    elif (path / PROMPT).is_file():
        folder.beside[PROMPT] = json.loads((path / PROMPT).read_text())
    return folder


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata (aliases of shared tensors) of model.safetensors."""
    file = existing(path, "model.safetensors")
    with safe_open(file, framework="pt") as opened:
        metadata = dict(opened.metadata() or {})
    return load_file(file), metadata


def place(
    module: nn.Module,
    weights: dict[str, Tensor],
    metadata: dict[str, str],
    names: Callable[[str], str],
    unused: Sequence[str],
    path: Path,
) -> Layout:
    """Put weights into a module that was made on the meta device, in the dtypes of the file.

    names: file key -> own name; unused: patterns (full match, own names) of tensors that are only kept.
    Raises ValueError naming keys that are unknown, missing or of another shape, and the nearest one.
    """
    # Heads are ours, and in a file of their own.
    expected = {name: value for name, value in module.state_dict().items() if not name.startswith(HEADS)}
    layout = Layout({}, {}, {}, metadata)
    placed: dict[str, Tensor] = {}
    unknown: list[str] = []
    for key, value in weights.items():
        name = names(key)
        if name in expected:
            # Shared tensors may be stored twice; here they are one, so they must be equal.
            if name in placed and not torch.equal(placed[name], value):
                raise ValueError(f"{path}/model.safetensors: {key} is another tensor than its alias {name}")
            layout.keys[key], layout.dtypes[key], placed[name] = name, value.dtype, value
        elif any(re.fullmatch(pattern, name) for pattern in unused):
            layout.unused[key] = value
        else:
            unknown.append(key)
    missing = sorted(expected.keys() - placed.keys())
    where = f"{path}/model.safetensors does not fit {path}/config.json"
    if unknown or missing:
        raise ValueError(f"{where}: {_difference(unknown, missing, weights, expected, names)}")
    for key, name in layout.keys.items():
        if weights[key].shape != expected[name].shape:
            raise ValueError(
                f"{where}: {key} has shape {list(weights[key].shape)}, it needs {list(expected[name].shape)}"
            )
    # `assign`: the module was made on the meta device and has no memory to copy into; the file's tensors become its
    # own.
    module.load_state_dict(placed, strict=False, assign=True)
    return layout


def new_folder(config: dict[str, Any], stats: Statistics) -> Folder:
    """The folder of a policy that was never saved: its configuration, LeRobot's usual steps, and these statistics."""
    inputs, outputs, modes = config["input_features"], config["output_features"], config["normalization_mapping"]
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    steps: dict[str, list[dict[str, Any]]] = {
        PROCESSORS[0]: [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {"registry_name": "to_batch_processor", "config": {}},
            device,
            {"registry_name": NORMALISERS[0], "config": {"eps": 1e-8, "features": inputs | outputs, "norm_map": modes}},
        ],
        PROCESSORS[1]: [
            {"registry_name": NORMALISERS[1], "config": {"eps": 1e-8, "features": outputs, "norm_map": modes}},
            device,
        ],
    }
    processors = {name: {"name": name, "steps": listed} for name, listed in steps.items()}
    folder = Folder(Path("policy.new"), config, processors, {})
    _replace_statistics(folder, stats)
    return folder


def new_layout(module: nn.Module) -> Layout:
    """All tensors of a module that is LeRobot's by name, as they are."""
    state = module.state_dict()
    return Layout({name: name for name in state}, {name: v.dtype for name, v in state.items()}, {}, {"format": "pt"})


def save_folder(path: Path, folder: Folder, layout: Layout, state: Mapping[str, Tensor], tokenizer: Any | None) -> None:
    """Write a folder back. state: all weights by their own names. A tensor keeps the dtype of its file where that
    changes no number of it."""
    path.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    write(path / "model.safetensors", stored(layout, weights) | layout.unused, layout.metadata)
    write_heads(path, weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(path / "tokenizer")
    for name, tensors in folder.states.items():
        write(path / name, tensors)
    for name, content in folder.beside.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write(path / name, content)
    for name, description in folder.processors.items():
        write(path / f"{name}.json", description)
    write(path / "config.json", folder.config)


def stored(layout: Layout, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights by the keys of their file, each in the dtype that it has there where that changes no number of it."""
    weights: dict[str, Tensor] = {}
    written: set[str] = set()
    for key, name in layout.keys.items():
        value = _stored(own[name], layout.dtypes[key])
        weights[key] = value.clone() if name in written else value  # safetensors writes no memory twice
        written.add(name)
    return weights


def write_heads(path: Path, own: Mapping[str, Tensor]) -> None:
    """genrl_heads.safetensors of a folder; none where there is no head."""
    heads = {name: value for name, value in own.items() if name.startswith(HEADS)}
    # Else a policy saved without heads would be loaded with those that were here before.
    (path / "genrl_heads.safetensors").unlink(missing_ok=True)
    if heads:
        write(path / "genrl_heads.safetensors", heads)


def existing(folder: Path, name: str) -> Path:
    """The path of a file; raises FileNotFoundError naming folder and file."""
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {name}: it is no folder of a saved policy")
    return path


def write(path: Path, content: dict[str, Tensor] | dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    """A file of tensors or JSON, under its name when it is complete."""
    partial = path.with_name(path.name + ".partial")
    if path.suffix == ".safetensors":
        save_file(content, partial, metadata=metadata or None)
    else:
        partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    stored = value.to(dtype)
    return stored if torch.equal(stored.to(value.dtype), value) else value


def _rename(folder: Folder, rename: Mapping[str, str]) -> None:
    steps = folder.processors["policy_preprocessor"]["steps"]
    for step in steps:
        if step["registry_name"] == "rename_observations_processor":
            step["config"] = {**step.get("config", {}), "rename_map": dict(rename)}
            return
    # First: the steps behind it go by the policy's names.
    steps.insert(0, {"registry_name": "rename_observations_processor", "config": {"rename_map": dict(rename)}})


def _replace_statistics(folder: Folder, stats: Statistics) -> None:
    flat = {f"{name}.{key}": value.float().cpu() for name, stat in stats.items() for key, value in stat.items()}
    for processor, description in folder.processors.items():
        for place, step in enumerate(description["steps"]):
            if step["registry_name"] == GROOT_DECODE:
                raise ValueError(
                    f"{folder.path}: its actions have the base model's statistics, so stats= has no meaning"
                )
            if step["registry_name"] in (*NORMALISERS, GROOT_PACK, GROOT_UNPACK):
                step.setdefault("state_file", f"{processor}_step_{place}_{step['registry_name']}.safetensors")
                folder.states[step["state_file"]] = copy.copy(flat)


def _difference(
    unknown: list[str],
    missing: list[str],
    weights: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    names: Callable[[str], str],
) -> str:
    """What is wrong with the keys, in one line."""
    stored, expected = _depths(map(names, weights)), _depths(own)
    # Another depth is said first: it is one cause of very many unknown or missing keys.
    for stack, depth in expected.items():
        if stored.get(stack, 0) != depth:
            size = "bigger" if stored.get(stack, 0) > depth else "smaller"
            return f"its {stack} has {stored.get(stack, 0)} layers, {size} than the {depth} of the configuration"
    if unknown:
        near = difflib.get_close_matches(names(unknown[0]), missing or list(own), n=1, cutoff=0.0)
        return f"{len(unknown)} unknown keys, the first {unknown[0]!r}; the nearest one that it needs is {near[0]!r}"
    near = difflib.get_close_matches(missing[0], list(weights), n=1, cutoff=0.0)
    return f"{len(missing)} keys are missing, the first {missing[0]!r}; the nearest one that it has is {near[0]!r}"


def _depths(names: Any) -> dict[str, int]:
    """Layers of every stack of layers: 1 + the highest number."""
    depths: dict[str, int] = {}
    for name in names:
        match = re.match(r"(.*?)\.layers\.(\d+)\.", name)
        if match:
            depths[match[1]] = max(depths.get(match[1], 0), int(match[2]) + 1)
    return depths
