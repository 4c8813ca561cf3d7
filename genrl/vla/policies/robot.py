"""What a LeRobot folder says of a robot: its observations and actions, and its instructions as tokens."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from genrl.vla.policies.lerobot import NORMALISERS, PROCESSORS, Folder
from genrl.vla.policies.normalise import Mode, normalise, unnormalise
from genrl.vla.policies.policy import ACTION, STATE, TOKENS, Batch, Statistics


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
        cameras = [name for name in (renamed or visual) if "empty_camera_" not in name]
        self.pictures = {back.get(name, name): name for name in cameras}
        self.vectors = {
            back.get(name, name): name for name, feature in inputs.items() if feature["type"] in ("STATE", "ENV")
        }
        self.widths = {name: int(inputs[name]["shape"][0]) for name in self.vectors.values()}
        self.image_size = int(inputs[cameras[0]]["shape"][-1]) if cameras else 0
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
        name = next(name for name, key in self.vectors.items() if key == STATE)
        return padded(self.vector(observation, name, device), width, name)

    def vector(self, observation: Batch, name: str, device: torch.device) -> Tensor:
        """The normalised numbers of a feature, by the environment's name, float32 [B, D] or [B, n, D]."""
        value, width = entry(observation, name).to(device), self.widths[self.vectors[name]]
        if value.shape[-1] != width:
            raise ValueError(f"{name} has {value.shape[-1]} numbers, the policy of {self.path} reads {width}")
        return self.normalise(value.float(), self.vectors[name])

    def picture(self, observation: Batch, name: str, device: torch.device) -> Tensor:
        """A picture as LeRobot hands it to a policy, float32 [..., 3, H, W], [0, 1] unless it is normalised."""
        pixels = picture(entry(observation, name), name, device)
        return self.normalise(pixels, self.pictures[name]).movedim(-1, -3).contiguous()

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
        for processor, kind in zip(PROCESSORS, NORMALISERS, strict=True):
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
        missing = [name for name in used if self.modes[name] != "IDENTITY" and not self.stats.get(name)]
        if missing:
            raise ValueError(
                f"{folder.path} has no statistics of {missing[0]!r}, to normalise by {self.modes[missing[0]]}: "
                "it is a base model; take those of the data set that it is to be trained on (policy.statistics: data; "
                "in Python Adapt(stats=...))"
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
        from genrl_rewards.models.checkpoints import tokenizer_of

        settings = folder.step("tokenizer_processor")
        self.max_length = int(settings.get("max_length", folder.config.get("tokenizer_max_length", 48)))
        self.truncation = bool(settings.get("truncation", True))
        source = folder.path / "tokenizer"
        name = settings.get("tokenizer_name", name)
        try:
            self.tokenizer: Any = tokenizer_of(str(source) if source.is_dir() else name, "policy")
        except (OSError, ValueError) as error:
            raise OSError(
                f"the tokenizer {name!r} of {folder.path} cannot be loaded: put its files into {source} ({error})"
            ) from error

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """int64 [B, max_length]; ends are cut off where the folder's preprocessor does.

        Raises ValueError for a text that is empty, that is too long and not to be cut, or that has the token 0.
        """
        empty = [row for row, text in enumerate(texts) if not text.strip()]
        if empty:
            raise ValueError(f"row {empty[0]} has no instruction: the environment must give a task_description")
        encoded = self.tokenizer(
            list(texts),
            padding="max_length",
            padding_side="right",
            max_length=self.max_length,
            truncation=self.truncation,
            return_tensors="pt",
        )
        tokens, valid = encoded["input_ids"], encoded["attention_mask"].bool()
        if tokens.shape[1] > self.max_length:
            raise ValueError(f"an instruction has {tokens.shape[1]} tokens, the policy takes {self.max_length}")
        zero = ((tokens == 0) & valid).any(1).nonzero()[:, 0].tolist()
        if zero:
            raise ValueError(f"{texts[zero[0]]!r} has token 0, which stands for padding (row {zero[0]})")
        result: Tensor = tokens.masked_fill(~valid, 0)
        return result


def with_newline(texts: Sequence[str]) -> list[str]:
    """pi0's and SmolVLA's prompts end with a line."""
    return [text if text.endswith("\n") or not text.strip() else f"{text}\n" for text in texts]


def tokens_of(observation: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """`TOKENS` and which of them are there, int64 and bool [B, L]."""
    tokens = entry(observation, TOKENS).to(device)
    return tokens, tokens > 0


def padded(value: Tensor, width: int, what: str) -> Tensor:
    """[..., D] with zeros to [..., width]."""
    if value.shape[-1] > width:
        raise ValueError(f"{what} has {value.shape[-1]} numbers, the policy takes {width}")
    return functional.pad(value, (0, width - value.shape[-1]))


def picture(value: Tensor, name: str, device: torch.device) -> Tensor:
    """uint8 [..., H, W, 3] -> float32 in [0, 1]. Raises ValueError for another shape or dtype."""
    if value.dtype != torch.uint8 or value.shape[-1] != 3:
        raise ValueError(f"{name} must be uint8 [..., H, W, 3], got {value.dtype} {list(value.shape)}")
    return value.to(device).float() / 255.0


def entry(observation: Batch, name: str) -> Tensor:
    """Raises KeyError naming what there is."""
    if name not in observation:
        raise KeyError(f"the policy needs {name!r}; the observation has {sorted(observation)}")
    return observation[name]


def letterbox(image: Tensor, size: tuple[int, int], padding: Literal["centre", "top_left"]) -> Tensor:
    """image [B, 3, H, W] in [0, 1] -> [B, 3, *size] in [0, 1]: bilinear, longer side fitted, padded with 0.

    padding: around the picture (pi0, pi0.5), or above and left of it (SmolVLA).
    """
    height, width = image.shape[-2:]
    if (height, width) == tuple(size):
        return image
    ratio = max(width / size[1], height / size[0])
    inner = (int(height / ratio), int(width / ratio))
    image = functional.interpolate(image, inner, mode="bilinear", align_corners=False).clamp(0.0, 1.0)
    high, wide = size[0] - inner[0], size[1] - inner[1]
    above, left = (high // 2, wide // 2) if padding == "centre" else (high, wide)
    return functional.pad(image, (left, wide - left, above, high - above))
