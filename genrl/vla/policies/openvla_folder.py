"""OpenVLA's folders (arXiv 2406.09246), those of OFT (2502.19645) too: weights by file, pictures, units of a data set.

config.json, preprocessor_config.json, tokenizer.json      sizes; how pictures are normalised; Llama-2's tokenizer
model-0000n-of-0000m.safetensors, model.safetensors.index.json      the weights, or model.safetensors
dataset_statistics.json                                    of the data sets; else `norm_stats` in config.json
action_head--N_checkpoint.pt, proprio_projector--N_checkpoint.pt    optional: OFT's continuous head and proprioception
oft.json                                                   ours: what no published file says (`policy.oft`)
genrl_heads.safetensors                                    ours: the critic

All other files, the remote code too, which is never executed, are kept as they are and written back; not weights in
other formats (.bin).
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from genrl.vla.config.files import data_set, data_sets
from genrl.vla.policies.lerobot import Adapt, Layout, existing, stored, write
from genrl.vla.policies.policy import ACTION, IMAGE, STATE, Batch, Statistics
from genrl.vla.policies.robot import entry, picture

INDEX, OWN = "model.safetensors.index.json", "oft.json"
PARTS = ("action_head", "proprio_projector")
"""Modules in files of their own, NAME--STEP_checkpoint.pt."""
CROP = math.sqrt(0.9)
"""Side of the central crop: 0.9 of the area, as OFT, SimpleVLA-RL and RLinf crop (their pictures were augmented so)."""
EPS = 1e-8


@dataclass(frozen=True)
class OFT:
    """See the section `policy.oft`."""

    unnorm_key: str | None = None
    chunk: int = 8
    cameras: tuple[str, ...] = (IMAGE,)
    centre_crop: bool = True


@dataclass
class Source:
    """A folder as read. weights: by key; those of a .pt file have its name and a colon before their key. file_of: file
    by key; others: the content of all further files."""

    path: Path
    config: dict[str, Any]
    oft: OFT
    weights: dict[str, Tensor]
    file_of: dict[str, str]
    metadata: dict[str, str]
    others: dict[str, bytes]

    def part(self, name: str) -> bool:
        """Whether it has the module, one of `PARTS`."""
        return any(key.startswith(f"{name}--") for key in self.file_of)


def read(path: Path, adapt: Adapt | None) -> Source:
    """Raises FileNotFoundError for a missing file, ValueError for two of a kind, and for settings of other policies."""
    if adapt is not None and (adapt.rename or adapt.stats is not None or adapt.padded_state is not None):
        raise ValueError(f"{path} holds an OpenVLA: write policy.oft, not policy.rename, padded_state or statistics")
    config = json.loads(existing(path, "config.json").read_text())
    keys = {field.name for field in fields(OFT)}
    settings: dict[str, Any] = json.loads((path / OWN).read_text()) if (path / OWN).is_file() else {}
    settings = {**settings, **(adapt.oft if adapt is not None and adapt.oft is not None else {})}
    if unknown := settings.keys() - keys:
        raise ValueError(f"{path}/{OWN}: unknown keys {sorted(unknown)}; there are {sorted(keys)}")
    oft = OFT(**settings | ({"cameras": tuple(settings["cameras"])} if "cameras" in settings else {}))
    shards = ["model.safetensors"]
    if (path / INDEX).is_file():
        shards = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
    for file in sorted(path.glob("*--*.pt")):
        if file.name.partition("--")[0] not in PARTS:
            text = f"is not known here, and leaving it out would change the policy; known are {', '.join(PARTS)}"
            raise ValueError(f"{file} {text} (no FiLM, no diffusion head)")
    weights: dict[str, Tensor] = {}
    file_of: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        tensors = load_file(existing(path, shard))
        weights |= tensors
        file_of |= dict.fromkeys(tensors, shard)
        with safe_open(path / shard, framework="pt") as opened:
            metadata |= opened.metadata() or {}
    for part in PARTS:
        files = sorted(path.glob(f"{part}--*.pt"))
        if len(files) > 1:
            raise ValueError(f"{path} has {len(files)} files {part}--*.pt: leave the one that belongs to the weights")
        for file in files:
            held = torch.load(file, map_location="cpu", weights_only=True)
            weights |= {f"{file.name}:{key}": value for key, value in held.items()}
            file_of |= {f"{file.name}:{key}": file.name for key in held}
    read_here = {"config.json", INDEX, OWN, "genrl_heads.safetensors", *file_of.values()}
    rest = (f for f in sorted(path.iterdir()) if f.is_file() and f.name not in read_here and f.suffix != ".bin")
    others = {file.name: file.read_bytes() for file in rest}
    return Source(path, config, oft, weights, file_of, metadata, others)


def own_name(key: str) -> str:
    """The name here of a key: in .pt files without `module.`, which distributed training puts before it."""
    file, colon, name = key.partition(":")
    return f"{file.partition('--')[0]}.{name.removeprefix('module.')}" if colon else key


def save(path: Path, source: Source, layout: Layout, own: dict[str, Tensor]) -> None:
    """Write a folder back; own: all weights by their own names."""
    path.mkdir(parents=True, exist_ok=True)
    weights = stored(layout, own) | layout.unused
    for file in sorted(set(source.file_of.values())):
        held = {key: weights[key] for key, place in source.file_of.items() if place == file}
        if file.endswith(".pt"):
            partial = path / f"{file}.partial"
            torch.save({key.partition(":")[2]: value for key, value in held.items()}, partial)
            partial.replace(path / file)
        else:
            write(path / file, held, source.metadata)
    shards = {key: file for key, file in source.file_of.items() if not file.endswith(".pt")}
    if set(shards.values()) != {"model.safetensors"}:
        size = sum(weights[key].numel() * weights[key].element_size() for key in shards)
        write(path / INDEX, {"metadata": {"total_size": size}, "weight_map": shards})
    for name, content in source.others.items():
        (path / name).write_bytes(content)
    write(path / OWN, asdict(source.oft))
    write(path / "config.json", source.config)


class Robot:
    """What a folder says of a robot: its pictures, its state, its actions in the units of one data set.

    Actions and states are mapped from q01 and q99 to [-1, 1] (BOUNDS_Q99) where the data set's mask says so. LIBERO's
    data sets have 1 for an open gripper and 0 for a closed one, its simulator -1 and 1: the border is here.
    """

    def __init__(self, source: Source) -> None:
        """Raises ValueError for a data set that the folder has no statistics of, naming the nearest."""
        every, self.path, oft = data_sets(source.path), source.path, source.oft
        self.data_set = data_set(every, oft.unnorm_key, source.path)
        self.cameras, self.crop = oft.cameras, oft.centre_crop
        self.image_size = int(source.config["image_sizes"][0])
        stats = every[self.data_set]
        self.stats: Statistics = {ACTION: self._bounds(stats, "action")}
        self.inputs = self.cameras
        if source.part("proprio_projector"):
            self.stats[STATE] = self._bounds(stats, "proprio")
            self.inputs = (STATE, *self.cameras)
        self.action_dim = len(self.stats[ACTION]["mask"])
        self.grips = self.data_set.startswith("libero")

    def _bounds(self, stats: dict[str, Any], what: str) -> dict[str, Tensor]:
        where = f"the statistics of {self.data_set!r} in {self.path}"
        if missing := {"q01", "q99"} - stats.get(what, {}).keys():
            raise ValueError(f"{where} have no {what}.{min(missing)}: they normalise by it")
        low, high = (torch.tensor(stats[what][name], dtype=torch.float32) for name in ("q01", "q99"))
        mask = torch.tensor(stats[what].get("mask") or [True] * len(low), dtype=torch.float32)
        return {"q01": low, "q99": high, "mask": mask}

    def normalised(self, actions: Tensor, width: int) -> Tensor:
        """Actions [..., A] of the robot in [-1, 1]; width is A."""
        if actions.shape[-1] != width:
            raise ValueError(f"the policy of {self.path} has actions of {width}, got {actions.shape[-1]}")
        if self.grips:
            actions = torch.cat([actions[..., :-1], (1.0 - actions[..., -1:]) / 2.0], -1)
        return self._scaled(actions, ACTION)

    def actions(self, chunk: Tensor) -> Tensor:
        """The inverse of `normalised`, [..., A]; a gripper of LIBERO opens or closes, nothing between."""
        low, high, mask = (self.stats[ACTION][name].to(chunk) for name in ("q01", "q99", "mask"))
        actions = torch.where(mask > 0, 0.5 * (chunk + 1.0) * (high - low + EPS) + low, chunk)
        if self.grips:
            actions = torch.cat([actions[..., :-1], torch.where(actions[..., -1:] > 0.5, -1.0, 1.0)], -1)
        return actions

    def state(self, observation: Batch, device: torch.device) -> Tensor:
        """float32 [B, P]."""
        state, width = entry(observation, STATE).to(device).float(), len(self.stats[STATE]["mask"])
        if state.shape[-1] != width:
            raise ValueError(f"{STATE} has {state.shape[-1]} numbers, the policy of {self.path} reads {width}")
        return self._scaled(state, STATE)

    def pictures(self, observation: Batch, device: torch.device) -> Tensor:
        """float32 [cameras B, 3, S, S] in [0, 1], camera by camera; resized (`lanczos`) and cropped."""
        shown = [picture(entry(observation, name), name, device).movedim(-1, -3) for name in self.cameras]
        pixels = torch.cat([self._sized(pixels) for pixels in shown])
        return central(pixels) if self.crop else pixels

    def _sized(self, pixels: Tensor) -> Tensor:
        size = (self.image_size, self.image_size)
        if pixels.shape[-2:] == size:
            return pixels
        # To whole levels between the two resizings, as the authors' program has a picture of bytes there.
        return (lanczos(pixels, size).clamp(0.0, 1.0) * 255.0).round() / 255.0

    def _scaled(self, value: Tensor, what: str) -> Tensor:
        low, high, mask = (self.stats[what][name].to(value) for name in ("q01", "q99", "mask"))
        return torch.where(mask > 0, 2.0 * (value - low) / (high - low + EPS) - 1.0, value).clamp(-1.0, 1.0)


def lanczos(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, C, H, W] resized by a Lanczos window of 3 that grows with what is left out: `tf.image.resize` of "lanczos3"
    with `antialias`, by which OFT's pictures were stored and are evaluated."""
    down, across = (_shares(old, new).to(pictures) for old, new in zip(pictures.shape[-2:], size, strict=True))
    return down @ pictures @ across.T


@functools.cache
def _shares(old: int, new: int) -> Tensor:
    """How much of each old pixel is in each new one, [new, old]: what Pillow makes of single pixels, in float32."""
    rows = Image.fromarray(np.eye(old, dtype=np.float32)).resize((old, new), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(rows))


def central(pictures: Tensor) -> Tensor:
    """The central 0.9 of the area at full size, in steps of 1 / 255: TensorFlow's crop_and_resize, bilinear with the
    corners of the box on those of the picture. [B, 3, H, W] in [0, 1]."""
    theta = pictures.new_tensor([[CROP, 0.0, 0.0], [0.0, CROP, 0.0]]).expand(len(pictures), 2, 3)
    grid = functional.affine_grid(theta, list(pictures.shape), align_corners=True)
    cropped = functional.grid_sample(pictures, grid, mode="bilinear", align_corners=True)
    # 255.5, cut off: what `tf.image.convert_image_dtype` does, by which the authors make bytes again.
    return (cropped.clamp(0.0, 1.0) * 255.5).floor().clamp(max=255.0) / 255.0


def colours(source: Source) -> list[tuple[Tensor, Tensor]]:
    """Mean and std [3, 1, 1] by which each of the two featurizers has its pictures normalised."""
    preprocessor = json.loads(existing(source.path, "preprocessor_config.json").read_text())
    effective = preprocessor.get("tvf_normalize_params")  # what is saved of the transform overrides `means` and `stds`
    means = [effective_one["mean"] for effective_one in effective] if effective else preprocessor["means"]
    stds = [effective_one["std"] for effective_one in effective] if effective else preprocessor["stds"]
    return [(torch.tensor(m)[:, None, None], torch.tensor(s)[:, None, None]) for m, s in zip(means, stds, strict=True)]
