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
from torch.nn import functional

from genrl.vla.policies.normalise import Mode, normalise, unnormalise
from genrl.vla.policies.policy import ACTION, STATE, TOKENS, Batch, Statistics

HEADS = ("value_head.", "noise_head.")
_PROCESSORS = ("policy_preprocessor", "policy_postprocessor")
_NORMALISERS = ("normalizer_processor", "unnormalizer_processor")
_KNOWN_STEPS = {
    *_NORMALISERS,
    "rename_observations_processor",
    "to_batch_processor",
    "device_processor",
    "tokenizer_processor",
    "pi0_new_line_processor",
    "smolvla_new_line_processor",
    "pi05_prepare_state_tokenizer_processor_step",
}


@dataclass(frozen=True)
class Adapt:
    """What a published policy gets beside its folder.

    rename: LeRobot's rename_map, name in the environment -> name in the policy; where it names pictures, those it does
    not name are empty cameras. stats: those of another data set, which a base model needs. Both are written with the
    policy.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    stats: Statistics | None = None


@dataclass
class Folder:
    """A folder as read. processors: the two descriptions by name; states: tensors, and beside: JSON, by file name."""

    path: Path
    config: dict[str, Any]
    processors: dict[str, dict[str, Any]]
    states: dict[str, dict[str, Tensor]]
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)

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


def read_folder(path: Path, adapt: Adapt) -> Folder:
    """Raises FileNotFoundError for a missing file, ValueError for a step of a processor that is not known here."""
    config = json.loads(existing(path, "config.json").read_text())
    processors = {name: json.loads(existing(path, f"{name}.json").read_text()) for name in _PROCESSORS}
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
                if Path(step["state_file"]).name != step["state_file"]:
                    raise ValueError(f"{path}/{name}.json: state_file must lie beside it, found {step['state_file']!r}")
                states[step["state_file"]] = load_file(existing(path, step["state_file"]))
    folder = Folder(path, config, processors, states)
    if adapt.rename:
        _rename(folder, adapt.rename)
    if adapt.stats is not None:
        _replace_statistics(folder, adapt.stats)
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
    own = {name: value for name, value in module.state_dict().items() if not name.startswith(HEADS)}
    layout = Layout({}, {}, {}, metadata)
    found: dict[str, Tensor] = {}
    unknown: list[str] = []
    for key, value in weights.items():
        name = names(key)
        if name in own:
            if name in found and not torch.equal(found[name], value):
                raise ValueError(f"{path}/model.safetensors: {key} is another tensor than its alias {name}")
            layout.keys[key], layout.dtypes[key], found[name] = name, value.dtype, value
        elif any(re.fullmatch(pattern, name) for pattern in unused):
            layout.unused[key] = value
        else:
            unknown.append(key)
    missing = sorted(own.keys() - found.keys())
    where = f"{path}/model.safetensors does not fit {path}/config.json"
    if unknown or missing:
        raise ValueError(f"{where}: {_difference(unknown, missing, weights, own, names)}")
    for key, name in layout.keys.items():
        if weights[key].shape != own[name].shape:
            raise ValueError(f"{where}: {key} has shape {list(weights[key].shape)}, it needs {list(own[name].shape)}")
    module.load_state_dict(found, strict=False, assign=True)
    return layout


def add_heads(policy: Any, path: Path) -> None:
    """Give a policy the critic and the noise head that its folder has in genrl_heads.safetensors."""
    file = path / "genrl_heads.safetensors"
    if not file.is_file():
        return
    weights = load_file(file)
    has = {name.split(".")[0] for name in weights}
    last = max((name for name in weights if re.fullmatch(r"value_head\.\d\.bias", name)), default=None)
    values = 0 if last is None else len(weights[last])
    policy.with_heads(critic=values, noise_head="expert" if "noise_head" in has else "none", seed=0)
    own = {name for name in policy.state_dict() if name.startswith(HEADS)}
    try:
        policy.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{file} does not fit {path}/config.json: {error}") from error
    if own != weights.keys():
        raise ValueError(f"{file} has not what a head is made of: {sorted(own ^ weights.keys())[0]!r}")


def train_in_float32(module: nn.Module) -> None:
    """Parameters that are trained become float32, whatever the file has: bfloat16 swallows steps of a relative 4e-3."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def save_folder(path: Path, folder: Folder, layout: Layout, module: nn.Module, tokenizer: Any | None) -> None:
    """Write a folder back. A tensor keeps the dtype of its file where that changes no number of it."""
    path.mkdir(parents=True, exist_ok=True)
    own = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}
    weights: dict[str, Tensor] = {}
    written: set[str] = set()
    for key, name in layout.keys.items():
        value = _stored(own[name], layout.dtypes[key])
        weights[key] = value.clone() if name in written else value  # safetensors writes no memory twice
        written.add(name)
    write(path / "model.safetensors", weights | layout.unused, layout.metadata)
    heads = {name: value for name, value in own.items() if name.startswith(HEADS)}
    (path / "genrl_heads.safetensors").unlink(missing_ok=True)
    if heads:
        write(path / "genrl_heads.safetensors", heads)
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


class Robot:
    """What a folder says of observations and actions: names, widths, statistics, modes.

    pictures: environment's name -> policy's name, in the policy's order, without empty cameras. Widths as in the
    configuration. Raises ValueError where a feature that is to be normalised has no statistics.
    """

    def __init__(self, folder: Folder) -> None:
        inputs: dict[str, dict[str, Any]] = folder.config["input_features"]
        rename: dict[str, str] = folder.step("rename_observations_processor").get("rename_map", {})
        unknown = sorted(set(rename.values()) - inputs.keys())
        if unknown:
            near = difflib.get_close_matches(unknown[0], list(inputs), n=1)
            hint = f"; the nearest one is {near[0]!r}" if near else ""
            raise ValueError(f"{folder.path}: rename names {unknown[0]!r}, the policy has {sorted(inputs)}{hint}")
        back = {new: old for old, new in rename.items()}
        visual = [name for name, feature in inputs.items() if feature["type"] == "VISUAL"]
        renamed = [name for name in visual if name in back]
        shown = [name for name in (renamed or visual) if "empty_camera_" not in name]
        self.pictures = {back.get(name, name): name for name in shown}
        self.vectors = {
            back.get(name, name): name for name, feature in inputs.items() if feature["type"] in ("STATE", "ENV")
        }
        self.widths = {name: int(inputs[name]["shape"][0]) for name in self.vectors.values()}
        self.image_size = int(inputs[shown[0]]["shape"][-1]) if shown else 0
        self.action_dim = int(folder.config["output_features"][ACTION]["shape"][0])
        self.path = folder.path
        self._types = {name: feature["type"] for name, feature in inputs.items()} | {ACTION: "ACTION"}
        self._read_statistics(folder)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the entries of an observation, without `TOKENS`."""
        return (*self.vectors, *self.pictures)

    def require_sight_and_state(self) -> None:
        """Raises ValueError where the policy has no picture or no `STATE` among its inputs."""
        if not self.pictures or STATE not in self.widths:
            raise ValueError(f"{self.path} needs a picture and {STATE!r} among its inputs, has {list(self.inputs)}")

    def state(self, observation: Batch, device: torch.device, width: int) -> Tensor:
        """The robot's own state, normalised and padded to `width` numbers, float32 [B, width]."""
        name = next(name for name, own in self.vectors.items() if own == STATE)
        return padded(self.vector(observation, name, device), width, name)

    def vector(self, observation: Batch, name: str, device: torch.device) -> Tensor:
        """The normalised numbers of a feature, by the environment's name, float32 [B, D] or [B, n, D]."""
        value, width = _entry(observation, name).to(device), self.widths[self.vectors[name]]
        if value.shape[-1] != width:
            raise ValueError(f"{name} has {value.shape[-1]} numbers, the policy of {self.path} reads {width}")
        return self.normalise(value.float(), self.vectors[name])

    def picture(self, observation: Batch, name: str, device: torch.device) -> Tensor:
        """A picture as LeRobot hands it to a policy, float32 [..., 3, H, W], [0, 1] unless it is normalised."""
        value = _entry(observation, name)
        if value.dtype != torch.uint8 or value.shape[-1] != 3:
            raise ValueError(f"{name} must be uint8 [..., H, W, 3], got {value.dtype} {list(value.shape)}")
        return self.normalise(value.to(device).float() / 255.0, self.pictures[name]).movedim(-1, -3).contiguous()

    def normalise(self, value: Tensor, name: str) -> Tensor:
        """[..., D] by the folder's mode for the policy's feature `name`."""
        return normalise(value, self.stats.get(name, {}), self.modes[name])

    def normalised(self, actions: Tensor, width: int) -> Tensor:
        """Actions [..., A] of the robot in the policy's units, padded with zeros to [..., width]."""
        if actions.shape[-1] != self.action_dim:
            raise ValueError(f"the policy of {self.path} has actions of {self.action_dim}, got {actions.shape[-1]}")
        return functional.pad(self.normalise(actions, ACTION), (0, width - self.action_dim))

    def actions(self, chunk: Tensor) -> Tensor:
        """The inverse of `normalised`, [..., A]."""
        return unnormalise(chunk[..., : self.action_dim].float(), self.stats.get(ACTION, {}), self.modes[ACTION])

    def _read_statistics(self, folder: Folder) -> None:
        found: dict[str, Statistics] = {}
        mapping: dict[str, Mode] = folder.config["normalization_mapping"]
        for processor, kind in zip(_PROCESSORS, _NORMALISERS, strict=True):
            steps = [s for s in folder.processors[processor]["steps"] if s["registry_name"] == kind]
            if len(steps) != 1:
                raise ValueError(f"{folder.path}/{processor}.json must have one step {kind!r}, found {len(steps)}")
            mapping = steps[0].get("config", {}).get("norm_map", mapping)
            stats: Statistics = {}
            for key, value in folder.states.get(steps[0].get("state_file", ""), {}).items():
                feature, _, statistic = key.rpartition(".")
                stats.setdefault(feature, {})[statistic] = value.flatten().float()
            found[kind] = stats
        self.modes: dict[str, Mode] = {name: mapping.get(kind, "IDENTITY") for name, kind in self._types.items()}
        self.stats = found["normalizer_processor"]
        self.stats[ACTION] = found["unnormalizer_processor"].get(ACTION, {})
        used = (*self.vectors.values(), *self.pictures.values(), ACTION)
        lost = [name for name in used if self.modes[name] != "IDENTITY" and not self.stats.get(name)]
        if lost:
            raise ValueError(
                f"{folder.path} has no statistics of {lost[0]!r}, which it is to normalise by {self.modes[lost[0]]}: "
                "a base model; pass those of the data set that it is to be trained on (Adapt(stats=...))"
            )
        width = {len(v) for key, v in self.stats[ACTION].items() if key != "count"}
        if self.modes[ACTION] != "IDENTITY" and width != {self.action_dim}:
            raise ValueError(f"{folder.path}: statistics of {ACTION!r} have {width} numbers, not {self.action_dim}")


class Prompts:
    """Instructions as token numbers by the tokenizer that a folder names, padded to its maximal length with 0.

    It is sought in `tokenizer/` of the folder, then where the name leads (a path or the hub). Raises OSError where it
    is in neither.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        from rewards.models.torchvision_compat import ensure

        ensure()
        from transformers import AutoTokenizer

        settings = folder.step("tokenizer_processor")
        self.max_length = int(settings.get("max_length", folder.config.get("tokenizer_max_length", 48)))
        self.truncation = bool(settings.get("truncation", True))
        source = folder.path / "tokenizer"
        name = settings.get("tokenizer_name", name)
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(source) if source.is_dir() else name)
        except (OSError, ValueError) as error:
            raise OSError(
                f"the tokenizer {name!r} of {folder.path} cannot be loaded: put its files into {source}"
            ) from error

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """int64 [B, max_length]; ends are cut off where the folder's preprocessor does.

        Raises ValueError for a text that is empty, that is too long and not to be cut, or that has the token 0.
        """
        empty = [row for row, text in enumerate(texts) if not text.strip()]
        if empty:
            raise ValueError(f"row {empty[0]} has no instruction: the environment must give a task_description")
        told = self.tokenizer(
            list(texts),
            padding="max_length",
            padding_side="right",
            max_length=self.max_length,
            truncation=self.truncation,
            return_tensors="pt",
        )
        tokens, there = told["input_ids"], told["attention_mask"].bool()
        if tokens.shape[1] > self.max_length:
            raise ValueError(f"an instruction has {tokens.shape[1]} tokens, the policy takes {self.max_length}")
        zero = ((tokens == 0) & there).any(1).nonzero()[:, 0].tolist()
        if zero:
            raise ValueError(f"{texts[zero[0]]!r} has token 0, which stands for padding (row {zero[0]})")
        result: Tensor = tokens.masked_fill(~there, 0)
        return result


def with_newline(texts: Sequence[str]) -> list[str]:
    """pi0's and SmolVLA's prompts end with a line."""
    return [text if text.endswith("\n") or not text.strip() else f"{text}\n" for text in texts]


def tokens_of(observation: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """`TOKENS` and which of them are there, int64 and bool [B, L]."""
    tokens = _entry(observation, TOKENS).to(device)
    return tokens, tokens > 0


def padded(value: Tensor, width: int, what: str) -> Tensor:
    """[..., D] with zeros to [..., width]."""
    if value.shape[-1] > width:
        raise ValueError(f"{what} has {value.shape[-1]} numbers, the policy takes {width}")
    return functional.pad(value, (0, width - value.shape[-1]))


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


def _entry(observation: Batch, name: str) -> Tensor:
    if name not in observation:
        raise KeyError(f"the policy needs {name!r}; the observation has {sorted(observation)}")
    return observation[name]


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    stored = value.to(dtype)
    return stored if torch.equal(stored.to(value.dtype), value) else value


def _rename(folder: Folder, rename: Mapping[str, str]) -> None:
    steps = folder.processors["policy_preprocessor"]["steps"]
    for step in steps:
        if step["registry_name"] == "rename_observations_processor":
            step["config"] = {**step.get("config", {}), "rename_map": dict(rename)}
            return
    steps.insert(0, {"registry_name": "rename_observations_processor", "config": {"rename_map": dict(rename)}})


def _replace_statistics(folder: Folder, stats: Statistics) -> None:
    flat = {f"{name}.{key}": value.float().cpu() for name, found in stats.items() for key, value in found.items()}
    for processor, description in folder.processors.items():
        for place, step in enumerate(description["steps"]):
            if step["registry_name"] in _NORMALISERS:
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
    there, wanted = _depths(map(names, weights)), _depths(own)
    for stack, depth in wanted.items():
        if there.get(stack, 0) != depth:
            size = "bigger" if there.get(stack, 0) > depth else "smaller"
            return f"its {stack} has {there.get(stack, 0)} layers, {size} than the {depth} of the configuration"
    if unknown:
        near = difflib.get_close_matches(names(unknown[0]), missing or list(own), n=1, cutoff=0.0)
        return f"{len(unknown)} unknown keys, the first {unknown[0]!r}; the nearest one that it needs is {near[0]!r}"
    near = difflib.get_close_matches(missing[0], list(weights), n=1, cutoff=0.0)
    return f"{len(missing)} keys are missing, the first {missing[0]!r}; the nearest one that it has is {near[0]!r}"


def _depths(names: Any) -> dict[str, int]:
    """Layers of every stack of layers: 1 + the highest number."""
    found: dict[str, int] = {}
    for name in names:
        match = re.match(r"(.*?)\.layers\.(\d+)\.", name)
        if match:
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found
