"""Reward checkpoints from a hub id or a folder: found, read without unpickling, and checked before any work.

transformers fills what a checkpoint lacks with random numbers and says so in a warning; a reward made of random
numbers still gives scores. Here a missing weight, or a model of another architecture, is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find(model: str, files: Sequence[str], reward: str) -> Path:
    """The first of `files` that `model` (a folder, or a hub id) has; `model` may also be such a file itself.

    Raises ValueError where there is no such folder, where it is empty or lacks them all, and where a hub id
    cannot be had (unknown, or offline and not in the cache).
    """
    path = Path(model)
    if path.is_file():
        return path
    if path.is_dir():
        for file in files:
            if (path / file).is_file():
                return path / file
        held = ", ".join(sorted(p.name for p in path.iterdir())[:12]) or "nothing: the folder is empty"
        raise ValueError(f"{reward}: {model!r} has no {' or '.join(files)}. It holds {held}")
    if not HUB_ID.fullmatch(model):
        raise ValueError(f"{reward}: there is no folder {model!r} (looked from {Path.cwd()}), and it is no hub id")
    for file in files:
        try:
            return Path(hf_hub_download(model, file))
        except LocalEntryNotFoundError as error:
            raise ValueError(
                f"{reward}: {model!r} is no folder here, and its file {file!r} is neither in the hub's cache nor "
                "can it be downloaded (offline?). Download the model and give its folder"
            ) from error
        except EntryNotFoundError:
            continue
        except HfHubHTTPError as error:
            raise ValueError(f"{reward}: the hub does not give {model!r}: {error}") from error
    raise ValueError(f"{reward}: the hub's {model!r} has no {' or '.join(files)}")


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a `.safetensors` file, or of a torch file by its restricted reader (nothing is unpickled).

    A file that holds them under `state_dict` or `model` is unwrapped.
    """
    if file.suffix == ".safetensors":
        return load_file(file)
    held: Any = torch.load(file, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
    if not isinstance(held, Mapping) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise ValueError(f"{file} holds no dictionary of tensors")
    return dict(held)


def fill(module: torch.nn.Module, weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Load weights into a module, every one of them and none left over. ValueError names those that do not fit."""
    wanted = module.state_dict()
    problems = [
        ("lacks", sorted(set(wanted) - set(weights))),
        ("has but should not", sorted(set(weights) - set(wanted))),
        ("has in another shape", sorted(k for k in set(wanted) & set(weights) if wanted[k].shape != weights[k].shape)),
    ]
    told = [f"it {verb} {len(keys)} weights ({', '.join(keys[:3])}...)" for verb, keys in problems if keys]
    if told:
        raise ValueError(f"{what} is of another architecture: {'; '.join(told)}")
    module.load_state_dict(dict(weights))


def model_type(model: str, reward: str) -> str:
    """The architecture that a checkpoint's config.json names, such as `clip`."""
    file = find(model, ["config.json"], reward)
    return str(json.loads(file.read_text(encoding="utf-8")).get("model_type"))


def check_type(model: str, types: Sequence[str], reward: str) -> str:
    """`model_type`, or ValueError where it is none of `types`."""
    found = model_type(model, reward)
    if found not in types:
        raise ValueError(f"{reward}: {model!r} is a {found!r} model; this reward needs {' or '.join(map(repr, types))}")
    return found


def pretrained(
    architecture: Any, model: str, *, types: Sequence[str], reward: str, dtype: torch.dtype = torch.float32
) -> Any:
    """A transformers model for scoring: weights from safetensors, all of them there, no gradients of its own.

    `architecture` is a class with `from_pretrained`; `types` are the values of `model_type` that it can load.
    """
    if types:
        check_type(model, types, reward)
    loaded, report = architecture.from_pretrained(model, dtype=dtype, use_safetensors=True, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"{reward}: {model!r} lacks {len(missing)} weights of {type(loaded).__name__} ({', '.join(missing[:3])}...)"
        )
    return loaded.eval().requires_grad_(False)


def torch_dtype(name: str, reward: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float16`; ValueError for another."""
    if name not in DTYPES:
        raise ValueError(f"{reward}: unknown dtype {name!r}. Known: {', '.join(DTYPES)}")
    return DTYPES[name]
