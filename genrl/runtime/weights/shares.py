"""Tensors that several processes hold in shares (FSDP), in a checkpoint: each process writes its own by
torch.distributed.checkpoint, and any number of processes reads them, one alone too.

A folder of `safetensors` files, some of each process, whose headers say where in the whole tensors their pieces belong.
torch's other format has a pickled index, which is not read here.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.futures import Future

FILE_BYTES = 2**27
"""Of a process's shares in one file, at most, but for a larger tensor: torch copies a file in memory to write it."""

Entries = dict[str, dict[str, Any]]
"""Size and sha256 by a file's name."""


def shares_of(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, DTensor]]:
    """Tensors of several processes, by the same names; without empty mappings."""
    sharded = {
        stem: {name: t for name, t in named.items() if isinstance(t, DTensor) and t.device_mesh.size() > 1}
        for stem, named in tensors.items()
    }
    return {stem: named for stem, named in sharded.items() if named}


def check_torch() -> None:
    """Raise ValueError where this torch cannot write them."""
    if "save_distributed" not in inspect.signature(HuggingFaceStorageWriter).parameters:
        text = f"torch {torch.__version__} cannot save weights that are trained in shards; take 2.13, or train a LoRA"
        raise ValueError(f"distributed.fsdp: {text}")


@dataclass(frozen=True)
class Shares:
    """All shares of one tensor, on disk."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    reader: HuggingFaceStorageReader

    def read(self, target: Tensor) -> Tensor:
        """Fill a tensor of this shape, or this process's share of one, and return it. No collective."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is not asked
            load({self.name: target}, storage_reader=self.reader, no_dist=True)
        return target

    def whole(self) -> Tensor:
        """On the CPU."""
        return self.read(torch.empty(self.shape, dtype=self.dtype))


def read(folder: Path) -> dict[str, Shares]:
    """What `write` wrote there, by name; the files' headers are read, and the tensors where they are asked for."""
    reader = _Reader(str(folder))
    entries = reader.read_metadata().state_dict_metadata
    return {
        name: Shares(name, stored.size, stored.properties.dtype, reader)
        for name, stored in entries.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def write(folder: Path, named: Mapping[str, DTensor], fault: Callable[[str], None]) -> Entries:
    """Each process writes its shares into this folder, syncs and hashes them. Returns, to the main one, the entries of
    all files. All processes together: where one fails, all raise OSError. fault: called before files are written."""
    writer = _Writer(folder, named, fault)
    try:
        save(dict(named), storage_writer=writer)
    except CheckpointException as error:
        failed = "; ".join(f"process {rank}: {why}" for rank, (why, _) in sorted(error.failures.items()))
        raise OSError(failed) from error
    return writer.entries


class _Writer(HuggingFaceStorageWriter):
    """fault: see `write`; entries: of all processes' files, in the main one."""

    def __init__(self, folder: Path, named: Mapping[str, DTensor], fault: Callable[[str], None]) -> None:
        super().__init__(str(folder), _files(named), save_distributed=True)
        self.folder, self.fault, self.entries = folder, fault, Entries()

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        """Hands on the entries of this process's files: what it wrote is in its own page cache, and another machine
        would read it over the network."""
        self.fault(f"write:{self.folder.name}")
        written = super().write_data(plan, planner).value()
        done: Future[Any] = Future()
        names = sorted({item.storage_data.relative_path for item in written})
        done.set_result([(name, entry(self.folder / name)) for name in names])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Finish in the main process. Raises OSError where it does not see the others' files."""
        self.entries.update(file_entry for of_process in results for file_entry in of_process)
        for name, entry in self.entries.items():
            file = self.folder / name
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                raise OSError(
                    f"the main process does not see {file}, which another one wrote: all have to share the file system "
                    "of output="
                )


class _Reader(HuggingFaceStorageReader):
    """Reads the files' headers once, for all tensors."""

    found: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self.found is None:
            self.found = super().read_metadata()
        return self.found


def _files(named: Mapping[str, DTensor]) -> dict[str, int]:
    """The number of the file that each tensor goes into, from 1."""
    numbers, number, room = {}, 1, FILE_BYTES
    for name, tensor in named.items():
        size = tensor.to_local().nbytes
        # A new file, unless this one is empty: a tensor larger than a file's share has one to itself.
        if size > room and room < FILE_BYTES:
            number, room = number + 1, FILE_BYTES
        numbers[name], room = number, room - size
    return numbers


def entry(file: Path) -> dict[str, Any]:
    """Size and sha256 of a file, as a manifest lists it."""
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def sha256(file: Path) -> str:
    """Checksum of its content, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
