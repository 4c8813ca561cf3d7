"""What a LeRobot folder says of a robot: its observations and actions, its instructions as tokens, and how states and
actions are normalised: modes, statistics, formulas.

Statistics are a dictionary of vectors [D], by the names of a data set's `meta/stats.json`; values are [..., D].
Everything that a mode maps from its bounds goes to [-1, 1]; nothing is clipped.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from genrl.vla.policies.lerobot import NORMALISERS, PROCESSORS, Folder
from genrl.vla.policies.policy import ACTION, STATE, TOKENS, Batch, Statistics

Mode = Literal["MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY"]

EPS = 1e-8
_BOUNDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
LEAST_SPREAD = 0.1
_MOST = 2**24
"""Rows of which torch computes quantiles."""
_QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def statistics(values: Tensor) -> dict[str, Tensor]:
    """min, max, mean, std (population), q01, q10, q50, q90, q99 of values [..., D], float32 [D] each, and count [1].

    Of more than 2^24 rows, quantiles are those of every second, third, ... one.

    Raises ValueError where there is none, or one is not finite.
    """
    # A float32 sum over millions of steps would lose the digits that small ranges need.
    flat = values.reshape(-1, values.shape[-1]).double()
    if not len(flat) or not bool(flat.isfinite().all()):
        bad = (~flat.isfinite()).any(1).nonzero()[:3, 0].tolist()
        raise ValueError(f"statistics need finite values; {len(flat)} rows, the first that are not finite: {bad}")
    stats = {
        "min": flat.amin(0),
        "max": flat.amax(0),
        "mean": flat.mean(0),
        "std": flat.std(0, correction=0),
        "count": torch.tensor([float(len(flat))]),
    }
    some = flat[:: -(-len(flat) // _MOST)]
    stats |= {name: some.quantile(share, dim=0) for name, share in _QUANTILES.items()}
    return {name: value.float() for name, value in stats.items()}


def with_least_spread(stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Statistics with bounds of quantiles at least `LEAST_SPREAD` of the range apart: a dimension that hardly ever
    moves (a gripper that closes once) would be blown up when it does."""
    widened = dict(stats)
    for low, high in (_BOUNDS["QUANTILES"], _BOUNDS["QUANTILE10"]):
        if {low, high, "min", "max"} <= widened.keys():
            lack = (LEAST_SPREAD * (widened["max"] - widened["min"]) - (widened[high] - widened[low])).clamp(
                min=0.0
            ) / 2.0
            widened[low], widened[high] = widened[low] - lack, widened[high] + lack
    return widened


def normalise(values: Tensor, stats: Mapping[str, Tensor], mode: Mode) -> Tensor:
    """`(x - mean) / (std + 1e-8)`, or `2 (x - low) / (high - low) - 1` with the mode's bounds (1e-8 apart if equal).

    MIN_MAX: min and max; QUANTILES: q01 and q99 (pi0.5); QUANTILE10: q10 and q90; IDENTITY: nothing. [..., D].
    Raises KeyError for statistics that are not there.
    """
    if mode == "IDENTITY":
        return values
    offset, scale = _affine(stats, mode, values)
    return (values - offset) / scale


def unnormalise(values: Tensor, stats: Mapping[str, Tensor], mode: Mode) -> Tensor:
    """The inverse of `normalise`, for actions of a policy on their way to the robot."""
    if mode == "IDENTITY":
        return values
    offset, scale = _affine(stats, mode, values)
    return values * scale + offset


def _affine(stats: Mapping[str, Tensor], mode: Mode, like: Tensor) -> tuple[Tensor, Tensor]:
    names = ("mean", "std") if mode == "MEAN_STD" else _BOUNDS.get(mode)
    if names is None:
        raise ValueError(f"mode must be MEAN_STD, MIN_MAX, QUANTILES, QUANTILE10 or IDENTITY, got {mode!r}")
    missing = [name for name in names if name not in stats]
    if missing:
        raise KeyError(f"mode {mode} needs the statistics {missing}, there are only {sorted(stats)}")
    low, high = (stats[name].to(like) for name in names)
    if low.shape[-1:] != like.shape[-1:]:  # else one number would be broadcast against many
        raise ValueError(f"{like.shape[-1]} numbers cannot be normalised by statistics of {low.shape[-1]}")
    if mode == "MEAN_STD":
        return low, high + EPS
    # A number that never moves in the data has no range: it maps to 0, and back to itself.
    half = torch.where(high == low, EPS, high - low) / 2.0
    return low + half, half


class Robot:
    """What a folder says of observations and actions: names, widths, statistics, modes.

    pictures: environment's name -> policy's name, in the policy's order, without empty cameras; left_empty: those that
    are empty because `policy.rename` names others alone. Widths, and shapes of pictures (height, width), as in the
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
        self.left_empty = tuple(n for n in visual if renamed and n not in renamed and "empty_camera_" not in n)
        self.vectors = {
            back.get(name, name): name for name, feature in inputs.items() if feature["type"] in ("STATE", "ENV")
        }
        self.widths = {name: int(inputs[name]["shape"][0]) for name in self.vectors.values()}
        self.shapes = {name: tuple(map(int, inputs[name]["shape"][-2:])) for name in cameras}
        self.image_size = max(self.shapes[cameras[0]]) if cameras else 0
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

    def picture_of_own_size(self, observation: Batch, name: str, device: torch.device) -> Tensor:
        """`picture`, for a policy that resizes none. Raises ValueError where it is not of the size that the folder
        names: what it shows would be larger or smaller than in training."""
        pixels, shape = self.picture(observation, name, device), self.shapes[self.pictures[name]]
        if pixels.shape[-2:] != shape:
            high, wide = pixels.shape[-2:]
            text = f"is {high} x {wide} (height x width), and the policy of {self.path} reads {shape[0]} x {shape[1]}"
            raise ValueError(f"{name} {text}, and resizes nothing: show it pictures of that size")
        return pixels

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
        by_kind: dict[str, Statistics] = {}
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
            by_kind[kind] = stats
        self.modes: dict[str, Mode] = {name: mapping.get(kind, "IDENTITY") for name, kind in self._types.items()}
        self.stats = by_kind["normalizer_processor"]
        self.stats[ACTION] = by_kind["unnormalizer_processor"].get(ACTION, {})
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
