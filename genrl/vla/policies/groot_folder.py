"""What LeRobot's folder of a GR00T N1.7 says beside its weights: sizes, units of the robot, prompts, pictures.

config.json names the base model (`base_model_path`), whose own config.json has the sizes, and that the backbone's
(`model_name`). Those of nvidia/GR00T-N1.7-3B and nvidia/Cosmos-Reason2-2B are known here; others are read from folders
of these names inside of the policy's. Normalisation is no step of its own but part of two: what is packed, and what is
decoded. The tokenizer, with its chat template, is the backbone's: from `tokenizer/`, then from the hub.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from genrl.vla.policies.lerobot import GROOT_DECODE, GROOT_PACK, GROOT_UNPACK, PROCESSORS, Folder
from genrl.vla.policies.policy import ACTION, STATE, Batch, Statistics
from genrl.vla.policies.robot import Prompts, Robot, entry

PUBLISHED = "nvidia/GR00T-N1.7"
"""How the names of the published base models begin; all have the sizes below. What was trained from them may name a
path on another machine, such as /cache/GR00T-N1.7-3B."""
BACKBONE = "nvidia/Cosmos-Reason2-2B"

SIZES: dict[str, Any] = {
    "model_name": BACKBONE,
    "backbone_embedding_dim": 2048,
    "select_layer": 16,
    "max_state_dim": 132,
    "max_action_dim": 132,
    "action_horizon": 40,
    "hidden_size": 1024,
    "input_embedding_dim": 1536,
    "state_history_length": 1,
    "add_pos_embed": True,
    "max_seq_len": 1024,
    "use_vlln": True,
    "use_alternate_vl_dit": True,
    "attend_text_every_n_blocks": 2,
    "diffusion_model_cfg": {
        "num_layers": 32,
        "num_attention_heads": 32,
        "attention_head_dim": 48,
        "output_dim": 1024,
        "interleave_self_attention": True,
    },
    "vl_self_attention_cfg": {"num_layers": 4, "num_attention_heads": 32, "attention_head_dim": 64},
    "num_timestep_buckets": 1000,
    "max_num_embodiments": 32,
}
"""The published base's, by the names of its config.json; what another one leaves out is as here."""

FIXED = {
    "positional_embeddings": None,
    "norm_type": "ada_norm",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_elementwise_affine": False,
    "norm_eps": 1e-5,
}
"""Settings of the transformers that are supported with this value alone."""

PROMPT = 64
"""The longest prompt in tokens, beside three for each picture."""


def base_sizes(folder: Folder) -> dict[str, Any]:
    """Sizes of the base model, by its own names. Raises FileNotFoundError where they are not known, and ValueError
    for a part that is not supported."""
    name = str(folder.config.get("base_model_path") or f"{PUBLISHED}-3B")
    config = _inside(folder, name)
    published = PUBLISHED.partition("/")[2].lower() in name.lower().replace("_", "-")
    if config is None and (not published or Path(name).exists()):  # a copy here may have been changed
        raise FileNotFoundError(
            f"{folder.path}/config.json: put the config.json of the base model {name!r} into {folder.path}/base and "
            "write base_model_path: ./base"
        )
    sizes = SIZES | (config or {})
    for part in ("diffusion_model_cfg", "vl_self_attention_cfg"):
        part_sizes = sizes.get(part) or {}
        wrong = [k for k, value in FIXED.items() if k in part_sizes and part_sizes[k] != value]
        if wrong:
            raise ValueError(
                f"{folder.path}: {part}.{wrong[0]} must be {FIXED[wrong[0]]!r}, found {part_sizes[wrong[0]]!r}"
            )
    if not sizes["diffusion_model_cfg"].get("interleave_self_attention") or sizes["state_history_length"] != 1:
        raise ValueError(f"{folder.path}: interleave_self_attention must be true and state_history_length 1")
    return sizes


def backbone_config(folder: Folder, sizes: dict[str, Any]) -> Any:
    """transformers' Qwen3VLConfig of the layers that are used. Raises FileNotFoundError where it is not known."""
    from transformers import Qwen3VLConfig

    name = sizes["model_name"]
    settings = _inside(folder, name)
    if settings is None and name != BACKBONE:
        raise FileNotFoundError(
            f"{folder.path}: put the config.json of the backbone {name!r} into {folder.path / name}"
        )
    if settings is None:
        text: dict[str, Any] = {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        }
        text |= {"head_dim": 128, "num_hidden_layers": 28, "rms_norm_eps": 1e-6, "vocab_size": 151936}
        scaling = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
        text |= {"rope_scaling": scaling, "rope_theta": 5000000, "max_position_embeddings": 262144}
        vision: dict[str, Any] = {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "depth": 24,
            "num_heads": 16,
            "patch_size": 16,
        }
        vision |= {"out_hidden_size": 2048, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]}
        vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
        ids: dict[str, Any] = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}
        settings = {"text_config": text, "vision_config": vision, "vision_end_token_id": 151653} | ids
    make: Any = Qwen3VLConfig
    config = make(**copy.deepcopy({k: v for k, v in settings.items() if k != "model_type"}))
    config.text_config.num_hidden_layers = min(config.text_config.num_hidden_layers, sizes["select_layer"])
    return config


def embodiment(folder: Folder) -> int:
    """The number of the robot, by the names in the folder. Raises ValueError for an unknown name."""
    pack = folder.step(GROOT_PACK)
    numbers: dict[str, int] = pack.get("embodiment_mapping", {})
    tag = pack.get("embodiment_tag", folder.config.get("embodiment_tag"))
    if tag not in numbers:
        near = difflib.get_close_matches(str(tag), sorted(numbers), n=1, cutoff=0.0)
        hint = f"; the nearest one is {near[0]!r}" if near else ""
        raise ValueError(f"{folder.path}/policy_preprocessor.json: embodiment_tag {tag!r} is not in the mapping{hint}")
    return int(numbers[tag])


class GrootRobot(Robot):
    """Units of a GR00T: [min, max] or [q01, q99] to [-1, 1], clipped, and 0 for a number that does not vary.

    gripper: the column of LIBERO's gripper, which the policy has as 0 and 1, and the simulator as 1 and -1; else None.
    frames: how often a picture is shown, the policy's video having that many. steps: the actions of a chunk that this
    robot was taught, from the first on.
    """

    def __init__(self, folder: Folder) -> None:
        pack = folder.step(GROOT_PACK)
        if not pack:
            raise ValueError(
                f"{folder.path}/policy_preprocessor.json has no step {GROOT_PACK!r}: only N1.7 is supported"
            )
        if pack.get("state_horizon", 1) != 1:
            raise ValueError(f"{folder.path}/policy_preprocessor.json: state_horizon must be 1")
        super().__init__(folder)
        self.frames = max(1, int(pack.get("video_horizon") or 1))
        self.steps = min(int(folder.config.get("chunk_size", 40)), int(pack.get("valid_action_horizon") or 40))
        self.pictures = self._in_order(pack.get("video_modality_keys"))

    def _in_order(self, wanted: Sequence[str] | None) -> dict[str, str]:
        """The pictures as the policy is shown them: by `video_modality_keys`, else in alphabetical order."""
        names = {new: old for old, new in self.pictures.items()}
        if not wanted:
            return {names[name]: name for name in sorted(names)}
        aliases = {"wrist_image": "image2"}
        ordered = []
        for key in wanted:
            either = (f"observation.images.{key}", f"observation.images.{aliases.get(key, key)}")
            ordered += [name for name in dict.fromkeys(either) if name in names][:1]
        if not ordered and names:
            raise ValueError(
                f"{self.path}: none of its cameras {sorted(names)} is one of {list(wanted)}, which it was trained "
                f"with; name them by policy.rename, e.g. observation.image: observation.images.{wanted[0]}"
            )
        return {names[name]: name for name in ordered}

    def normalise(self, value: Tensor, name: str) -> Tensor:
        if self.modes[name] == "IDENTITY":
            return value
        low, high = (self.stats[name][key].to(value) for key in ("min", "max"))
        varies = high != low
        unit = 2.0 * (value - low) / torch.where(varies, high - low, 1.0) - 1.0
        unit = torch.where(varies, unit, 0.0)
        return unit.clamp(-1.0, 1.0) if self.clips else unit

    def normalised(self, actions: Tensor, width: int) -> Tensor:
        if self.gripper is not None:
            actions = actions.clone()
            actions[..., self.gripper] = (1.0 - actions[..., self.gripper]) / 2.0
        return super().normalised(actions, width)

    def actions(self, chunk: Tensor) -> Tensor:
        unit = chunk[..., : self.action_dim].float()
        if self.modes[ACTION] != "IDENTITY":
            low, high = (self.stats[ACTION][key].to(unit) for key in ("min", "max"))
            unit = (unit.clamp(-1.0, 1.0) + 1.0) / 2.0 * (high - low) + low
        if self.gripper is not None:
            # LIBERO's gripper knows two commands: what is between them would be held half open.
            unit[..., self.gripper] = -(2.0 * unit[..., self.gripper] - 1.0).sign()
        return unit

    def pixels(self, observation: Batch, name: str, device: torch.device) -> Tensor:
        """uint8 [B, H, W, 3] of the environment as float32 [B, 3, H, W], 0 to 255."""
        value = entry(observation, name)
        if value.dtype != torch.uint8 or value.shape[-1] != 3 or value.ndim != 4:
            raise ValueError(f"{name} must be uint8 [B, H, W, 3], got {value.dtype} {list(value.shape)}")
        return value.to(device).float().movedim(-1, -3)

    def _read_statistics(self, folder: Folder) -> None:
        pack, steps = folder.step(GROOT_PACK), folder.processors[PROCESSORS[0]]["steps"]
        stats = _statistics(folder, next(step for step in steps if step["registry_name"] == GROOT_PACK))
        self.clips = bool(pack.get("clip_outliers", True))
        mode: Any = "MIN_MAX" if pack.get("normalize_min_max", True) else "IDENTITY"
        self.modes = (
            dict.fromkeys(self._types, "IDENTITY") | {ACTION: mode} | dict.fromkeys(self.vectors.values(), mode)
        )
        wrong = [name for name in self.vectors.values() if name != STATE]
        if wrong:
            raise ValueError(f"{folder.path}: a GR00T reads no {wrong[0]!r}, only pictures and {STATE!r}")
        steps = folder.processors[PROCESSORS[1]]["steps"]
        decode = [step for step in steps if step["registry_name"] in (GROOT_UNPACK, GROOT_DECODE)]
        if len(decode) != 1:
            raise ValueError(f"{folder.path}/policy_postprocessor.json must have one of {[GROOT_UNPACK, GROOT_DECODE]}")
        self.gripper: int | None = None
        config = decode[0].get("config", {})
        groups = {ACTION: self.action_dim}
        if decode[0]["registry_name"] == GROOT_DECODE:
            stats[ACTION], groups = _grouped(config, folder.path)
        else:
            stats[ACTION] = _statistics(folder, decode[0]).get(ACTION, {})
        transform = folder.config.get("action_decode_transform")
        tag = folder.config.get("embodiment_tag")
        if transform == "libero" or (transform == "auto" and tag == "libero_sim"):
            before = list(groups)[: list(groups).index("gripper")] if "gripper" in groups else None
            self.gripper = self.action_dim - 1 if before is None else sum(groups[name] for name in before)
        elif transform not in (None, "auto", "none"):
            raise ValueError(
                f"{folder.path}/config.json: action_decode_transform must be libero or null, not {transform}"
            )
        self.stats: Statistics = {}
        for name in (*self.vectors.values(), ACTION) if mode == "MIN_MAX" else ():
            width = self.action_dim if name == ACTION else self.widths[name]
            bounds = {key: stats.get(name, {}).get(key) for key in ("min", "max")}
            if any(value is None for value in bounds.values()):
                raise ValueError(
                    f"{folder.path} has no statistics of {name!r}: it is a base model; take those of the data set that "
                    "it is to be trained on (policy.statistics: data; in Python Adapt(stats=...))"
                )
            self.stats[name] = {
                key: value.flatten()[:width].float() for key, value in bounds.items() if value is not None
            }
            short = len(self.stats[name]["min"])
            if short != width:
                raise ValueError(f"{folder.path}: statistics of {name!r} have {short} numbers, not {width}")


def _statistics(folder: Folder, step: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    stats: dict[str, dict[str, Tensor]] = {}
    for key, value in folder.states.get(step.get("state_file", ""), {}).items():
        feature, _, statistic = key.rpartition(".")
        stats.setdefault(feature, {})[statistic] = value.flatten().float()
    return stats


def _grouped(config: dict[str, Any], path: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Bounds of the actions by the groups of a base's statistics, one after another, and the groups' widths.

    Raises ValueError for a group that is relative to the state.
    """
    action = (config.get("modality_config") or {}).get("action", {})
    bounds = ("q01", "q99") if config.get("use_percentiles") else ("min", "max")
    low: list[Tensor] = []
    high: list[Tensor] = []
    groups: dict[str, int] = {}
    configs = action.get("action_configs") or []
    for number, name in enumerate(action.get("modality_keys", [])):
        how = configs[number] if number < len(configs) else {}
        if str(how.get("rep", "")).lower().endswith("relative"):
            raise ValueError(
                f"{path}/policy_postprocessor.json: the actions {name!r} are relative to the state, which is not "
                "supported: train a policy of absolute actions in LeRobot (use_relative_actions: false)"
            )
        stats = config["raw_stats"]["action"][name]
        low.append(torch.tensor(stats[bounds[0]]).float().flatten())
        high.append(torch.tensor(stats[bounds[1]]).float().flatten())
        groups[name] = len(low[-1])
    return ({"min": torch.cat(low), "max": torch.cat(high)} if low else {}), groups


class GrootPrompts(Prompts):
    """Prompts of the tokenizer's chat template: so many pictures, then the instruction, as one message of a user.

    A picture has one token here; the policy puts in as many as it has places.
    """

    def __init__(self, folder: Folder, name: str, pictures: int) -> None:
        super().__init__(folder, folder.step("groot_n1_7_vlm_encode_v1").get("model_name", name))
        self.max_length, self.truncation, self.pictures = PROMPT + 3 * pictures, False, pictures
        self.plain = bool(folder.step(GROOT_PACK).get("formalize_language", True))
        if not self.tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {folder.path} has no chat template: take the backbone's, of {name}")

    def __call__(self, texts: Sequence[str]) -> Tensor:
        empty = [row for row, text in enumerate(texts) if not text.strip()]
        if empty:
            raise ValueError(f"row {empty[0]} has no instruction: the environment must give a task_description")
        images = [{"type": "image"}] * self.pictures
        written = []
        for text in texts:
            instruction = plain(text) if self.plain else text
            message = {"role": "user", "content": [*images, {"type": "text", "text": instruction}]}
            written.append(self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=False))
        return super().__call__(written)


def plain(text: str) -> str:
    """The text in lower case, with nothing but letters, digits, spaces and underscores."""
    return "".join(sign for sign in text.lower() if sign.isalnum() or sign.isspace() or sign == "_")


class Eye:
    """How a picture becomes what the backbone is shown: resized, its middle cut out, resized again."""

    def __init__(self, folder: Folder, config: Any) -> None:
        """config: the backbone's."""
        step = folder.step("groot_n1_7_vlm_encode_v1")
        self.target: Any = step.get("image_target_size")
        if not step or not self.target:
            raise ValueError(f"{folder.path}/policy_preprocessor.json: the step groot_n1_7_vlm_encode_v1 must have an "
                             "image_target_size")  # fmt: skip
        self.edge = int(step.get("shortest_image_edge") or self.target[0])
        crop = step.get("image_crop_size")
        self.fraction = step.get("crop_fraction") or (crop[0] / self.target[0] if crop else 1.0)
        self.area, self.square = bool(step.get("use_albumentations")), bool(step.get("letter_box_transform"))
        self.patch, self.merge = config.vision_config.patch_size, config.vision_config.spatial_merge_size
        self.frames = config.vision_config.temporal_patch_size

    def resized(self, picture: Tensor) -> Tensor:
        """float32 [B, 3, H, W], whole numbers from 0 to 255, before and after."""
        height, width = picture.shape[-2:]
        if self.square and height != width:
            side = max(height, width)
            left, top = (side - width) // 2, (side - height) // 2
            picture = functional.pad(picture, (left, side - width - left, top, side - height - top))
        if self.area:
            return by_area(self._middle(by_area(picture, self.edge), int), self.edge)
        picture = self._middle(bicubic(picture, (self.edge, self.edge)), round)
        return bicubic(picture, tuple(self.target))

    def _middle(self, picture: Tensor, whole: Any) -> Tensor:
        if not 0.0 < self.fraction < 1.0:
            return picture
        height, width = picture.shape[-2:]
        high, wide = max(1, whole(height * self.fraction)), max(1, whole(width * self.fraction))
        top, left = (height - high) // 2, (width - wide) // 2
        return picture[..., top : top + high, left : left + wide]

    def patches(self, picture: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Patches [B, rows columns, 3 frames patch patch] of pictures [B, 3, H, W] in Qwen's order, neighbours that are
        merged side by side, each shown `frames` times; and (rows, columns). Raises ValueError for sizes that Qwen would
        resize once more."""
        sized = self.resized(picture)
        height, width = sized.shape[-2:]
        cell = self.patch * self.merge
        if height % cell or width % cell:
            raise ValueError(f"pictures become {height} x {width}, which must be multiples of {cell}: show square ones")
        rows, columns = height // self.patch, width // self.patch
        split = (sized / 255.0 - 0.5) / 0.5
        split = split.view(len(sized), 3, rows // self.merge, self.merge, self.patch, columns // self.merge, self.merge,
                           self.patch)  # fmt: skip
        split = split.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
        split = split.expand(*split.shape[:6], self.frames, self.patch, self.patch)
        return split.reshape(len(sized), rows * columns, -1), (rows, columns)


def bicubic(picture: Tensor, size: tuple[int, ...]) -> Tensor:
    """[B, C, H, W] of whole numbers, smoothed where it shrinks. On a CPU in bytes, rows and columns each rounded, as
    torchvision does it there for LeRobot; elsewhere bytes are not supported."""
    if tuple(picture.shape[-2:]) == size:
        return picture
    pixels = picture.to(torch.uint8) if picture.device.type == "cpu" else picture
    resized = functional.interpolate(pixels, list(size), mode="bicubic", align_corners=False, antialias=True)
    return resized.float().clamp(0.0, 255.0).round()


def by_area(picture: Tensor, edge: int) -> Tensor:
    """[B, C, H, W] with its shorter side resized to `edge`, as OpenCV's INTER_AREA does, whole numbers."""
    height, width = picture.shape[-2:]
    if min(height, width) == edge:
        return picture
    scale = edge / min(height, width)
    rows = _area(height, max(1, round(height * scale)), edge > min(height, width)).to(picture)
    columns = _area(width, max(1, round(width * scale)), edge > min(height, width)).to(picture)
    return (rows @ picture @ columns.T).clamp(0.0, 255.0).round()


def _area(size: int, wanted: int, grows: bool) -> Tensor:
    """Weights [wanted, size] of OpenCV's INTER_AREA: the share of each cell; where a picture grows, linear between the
    two cells that the borders of the new one lie in."""
    step = size / wanted
    new, old = torch.arange(wanted, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    if not grows:
        shares = (torch.minimum(old + 1, (new + 1) * step) - torch.maximum(old, new * step)).clamp(min=0.0)
        return (shares / step).float()
    # A whole number may come out a hair below.
    first = (new * step + 1e-9).floor()
    second = ((new + 1) - (first + 1) / step).clamp(min=0.0)
    second = second - second.floor()
    weights = torch.zeros(wanted, size, dtype=torch.float64)
    weights.scatter_add_(1, first.long().clamp(max=size - 1), 1.0 - second)
    weights.scatter_add_(1, (first.long() + 1).clamp(max=size - 1), second)
    return weights.float()


def _inside(folder: Folder, name: str) -> dict[str, Any] | None:
    """config.json of a folder of this name inside of the policy's, which is written back with it; None without."""
    file = folder.path / name / "config.json"
    if not file.is_file() or not file.resolve().is_relative_to(folder.path.resolve()):
        return None
    content: dict[str, Any] = json.loads(file.read_text())
    folder.beside[f"{name}/config.json"] = content
    return content
