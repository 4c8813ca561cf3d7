"""Encodings of prompts on disk: one safetensors file each, under a hash of all that they depend on.

Several processes and runs may use a folder at once: a file appears under its name when it is complete, and the least
recently used ones go where the folder outgrows its bound.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from genrl.config.folders import is_single_file, read_json
from genrl.diffusion.config.files import model_folder
from genrl.diffusion.config.model_rules import DENOISERS, is_text_encoder, quantized
from genrl.diffusion.config.schema import Config

MOST_BYTES = 20 * 10**9
"""Of a folder."""
TELLS = {"path", "config", "pipeline", "revision", "variant", "use_safetensors", "without", "dtype", "autocast"}
"""Keys of the section `model` that say which encoders there are, and how they compute."""


class Store:
    """Encodings in `folder`, up to `most` bytes. identity: of the encoders, and how they compute."""

    def __init__(self, folder: Path, identity: str, most: float) -> None:
        self.folder, self.identity, self.most = folder, identity, most
        folder.mkdir(parents=True, exist_ok=True)
        self.written = 0
        """Bytes written by this process."""
        self._size = sum(size for _, size, _ in self._files())

    def name(self, key: Hashable) -> str:
        """File of an encoding: key is made of plain values in tuples, whose `repr` says all of them."""
        return hashlib.sha256(f"{self.identity}\n{key!r}".encode()).hexdigest()

    def read(self, name: str) -> tuple[Any] | None:
        """The encoding, on the CPU, in a tuple; None where it is not there, or its file is damaged."""
        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                tree = json.loads((file.metadata() or {})["tree"])
                value = _planted(tree, file)
            os.utime(path)  # it has been used
        except FileNotFoundError:
            return None
        # Damage costs one encoding, which can be made again: the caller does, as for one that was never there.
        except (SafetensorError, KeyError, ValueError):
            path.unlink(missing_ok=True)
            return None
        return (value,)

    def write(self, name: str, value: Any) -> None:
        """Keep an encoding. Raises ValueError for what a file cannot hold."""
        path, tensors = self._path(name), dict[str, Tensor]()
        tree = _felled(value, tensors)
        path.parent.mkdir(exist_ok=True)
        # With the process's number: others may write the same encoding, and equal names would mix two files.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        save_file(tensors, partial, metadata={"tree": json.dumps(tree)})
        size = partial.stat().st_size
        partial.replace(path)
        self.written += size
        self._size += size
        # It would remove what it is going to need, and every epoch would encode everything again.
        if self.written > self.most:
            raise ValueError(
                f"model.encodings: the encodings of this run alone take more than {self.most / 1e9:g} GB; take fewer "
                "prompts, or write null"
            )
        if self._size > self.most:
            self._shrink()

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}.safetensors"

    def _files(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of every file."""
        files = []
        for path in self.folder.glob("??/*.safetensors"):
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process removed it
                continue
            files.append((stat.st_mtime, stat.st_size, path))
        return files

    def _shrink(self) -> None:
        """Remove what was used longest ago, to nine tenths of the bound."""
        files = sorted(self._files())
        self._size = sum(size for _, size, _ in files)
        for _, size, path in files:
            # Below the bound by some, or every further file would list the folder again.
            if self._size <= 0.9 * self.most:
                break
            path.unlink(missing_ok=True)
            self._size -= size


def open_store(config: Config, device: torch.device) -> Store | None:
    """The folder that `model.encodings` names; None where it names none."""
    model = config.model
    if model.encodings is None:
        return None
    # All that may change an encoding by more than nothing: one left out here would hand out another model's texts in
    # silence.
    parts = [diffusers.__version__, transformers.__version__, json.dumps(model.model_dump(mode="json", include=TELLS))]
    parts += [device.type, json.dumps(_kinds(config), sort_keys=True)]
    code = (model.pipeline or "").rpartition(":")[0]  # file.py of a class of one's own
    files = [model.path] * is_single_file(model.path) + [code] * code.endswith(".py")
    parts += [_stamped(Path(file).expanduser()) for file in files]
    folder = model_folder(config)
    parts += [] if folder is None else list(_files_of(folder))
    return Store(Path(model.encodings).expanduser(), "\n".join(parts), MOST_BYTES)


def _kinds(config: Config) -> dict[str, str]:
    """How text encoders are quantised."""
    names = [f"text_encoder{suffix}" for suffix in ("", "_2", "_3", "_4")]
    return {name: kind for name, kind in quantized(config.model, names).items() if is_text_encoder(name)}


def _files_of(folder: Path) -> list[str]:
    """All of a pipeline's folder but its denoisers, since not every encoder is called one (`projection_model`): name
    and size of each file, with its hash where it lies in the hub's cache, else the time of its last change."""
    index = folder / "model_index.json"
    parts = [folder / name for name, entry in read_json(index).items() if isinstance(entry, list)]
    files = [path for part in sorted(parts) if part.name not in DENOISERS for path in sorted(part.rglob("*"))]
    return [_stamped(path) for path in [index, *files] if path.is_file()]


def _stamped(path: Path) -> str:
    real = path.resolve()
    stamp = real.name if real.parent.name == "blobs" else str(real.stat().st_mtime_ns)
    return f"{path.parent.name}/{path.name} {real.stat().st_size} {stamp}"


def _felled(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Value as JSON; its tensors go into `tensors`."""
    if isinstance(value, Tensor):
        tensors[str(len(tensors))] = value.contiguous().clone()  # two may share memory, which files do not
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [_felled(part, tensors) for part in value]}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise ValueError(f"model.encodings: an encoding holds a {type(value).__name__}, which no file can; write null")


def _planted(tree: Any, file: Any) -> Any:
    """The reverse."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return file.get_tensor(content)
    values = [_planted(part, file) for part in content]
    return tuple(values) if kind == "tuple" else values
