"""Reward checkpoints from a hub id or a folder: found, read without unpickling, and checked before any work.

A missing weight, a tokenizer without vocabulary or a model of another architecture is an error (`models.accounts`).

Import `transformers` from here: then it loads whatever torchvision is installed.
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

from genrl_rewards.contract import check_choice
from genrl_rewards.models.accounts import accounted
from genrl_rewards.models.torchvision_compat import ensure

ensure()  # before transformers is imported for the first time

import transformers as transformers  # noqa: E402
from transformers.initialization import no_init_weights as no_init_weights  # noqa: E402

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find(model: str, files: Sequence[str], reward: str) -> Path:
    """The first of `files` in `model`, a folder or a hub id; `model` may also be such a file itself.

    Raises ValueError if there is no such folder, if it has none of the files, and if the hub's files cannot be
    downloaded (unknown id, or offline and not in the cache).
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
        raise ValueError(f"{reward}: there is no folder {model!r} (looked from {Path.cwd()}), and it is not a hub id")
    for file in files:
        try:
            return Path(hf_hub_download(model, file))
        except LocalEntryNotFoundError as error:
            raise ValueError(
                f"{reward}: {model!r} is not a folder here, and its file {file!r} is neither in the hub's cache nor "
                "can it be downloaded (offline?). Download the model and give its folder"
            ) from error
        except EntryNotFoundError:
            continue
        except HfHubHTTPError as error:
            raise ValueError(f"{reward}: {model!r} cannot be downloaded from the hub: {error}") from error
    raise ValueError(f"{reward}: the hub's {model!r} has no {' or '.join(files)}")


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a `.safetensors` file, or of a torch file read by its restricted reader (nothing is unpickled).

    They may be nested under `state_dict` or `model`. Raises ValueError for a file that holds anything else.
    """
    if file.suffix == ".safetensors":
        return load_file(file)
    held: Any = torch.load(file, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
    if not isinstance(held, Mapping) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise ValueError(f"{file} does not hold a dictionary of tensors")
    return dict(held)


def renamed(name: str, rules: Mapping[str, str]) -> str:
    """A weight's name after all substitutions, from regular expressions to their replacements, in their order."""
    for pattern, replacement in rules.items():
        name = re.sub(pattern, replacement, name)
    return name


def fill(module: torch.nn.Module, weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Load weights into a module. Raises ValueError, naming some, unless they are exactly those of the module."""
    expected = module.state_dict()
    problems = [
        ("lacks", sorted(set(expected) - set(weights))),
        ("has but should not", sorted(set(weights) - set(expected))),
        (
            "has in another shape",
            sorted(k for k in set(expected) & set(weights) if expected[k].shape != weights[k].shape),
        ),
    ]
    listed = [f"it {verb} {len(keys)} weights ({', '.join(keys[:3])}...)" for verb, keys in problems if keys]
    if listed:
        raise ValueError(f"{what} is of another architecture: {'; '.join(listed)}")
    module.load_state_dict(dict(weights))


def model_type(model: str, reward: str) -> str:
    """The architecture named by a checkpoint's config.json, such as `clip`."""
    file = find(model, ["config.json"], reward)
    return str(json.loads(file.read_text(encoding="utf-8")).get("model_type"))


def check_type(model: str, types: Sequence[str], reward: str) -> None:
    """Raise ValueError unless the `model_type` of a checkpoint is one of `types`."""
    kind = model_type(model, reward)
    if kind not in types:
        raise ValueError(f"{reward}: {model!r} is a {kind!r} model; this reward needs {' or '.join(map(repr, types))}")


def qwen_pictures(model: str, least: int, most: int) -> Any:
    """The `Qwen2VLImageProcessorPil` of a checkpoint, resizing pictures to so many pixels.

    By these names, for published files have them: they come before the `size` that newer ones have.
    """
    return transformers.Qwen2VLImageProcessorPil.from_pretrained(model, min_pixels=least, max_pixels=most)


def pretrained(
    architecture: Any,
    model: str,
    *,
    types: Sequence[str],
    reward: str,
    dtype: torch.dtype = torch.float32,
    quantization: Any = None,
) -> Any:
    """A transformers model for scoring: all its weights read from safetensors, its parameters without gradients.

    `architecture` is a class with `from_pretrained`; `types` are the values of `model_type` that it can load, empty for
    any; `quantization` is transformers' configuration of weights in fewer bits. Raises ValueError for another type, and
    as `accounted`.
    """
    if types:
        check_type(model, types, reward)
    held = {} if quantization is None else {"quantization_config": quantization}
    with accounted(f"{reward}: {model!r}"):
        loaded = architecture.from_pretrained(model, dtype=dtype, use_safetensors=True, **held)
    # Parameters alone are frozen: a differentiable score still has its gradient to the pictures.
    return loaded.eval().requires_grad_(False)


def tokenizer_of(model: str, reward: str, **options: Any) -> Any:
    """The tokenizer of a checkpoint. Raises ValueError where there is none, or it has no vocabulary."""
    with accounted(f"{reward}: the tokenizer of {model!r}"):
        return transformers.AutoTokenizer.from_pretrained(model, **options)


def torch_dtype(name: str, reward: str) -> torch.dtype:
    """The dtype called `float32`, `bfloat16` or `float16`; ValueError for another name."""
    check_choice(f"{reward}: unknown dtype", name, DTYPES)
    return DTYPES[name]
