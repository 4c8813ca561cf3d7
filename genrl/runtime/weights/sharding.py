"""FSDP2, which shards in place and keeps every module's class: over several processes, or with blocks that wait on the
CPU.

With adapters the frozen weights are sharded, and adapters, their gradients and optimiser state are whole in every
process. In full fine-tuning all of them live as shards, and are saved so (below).

Tensors that several processes hold in shares (FSDP), in a checkpoint: each process writes its own by
torch.distributed.checkpoint, and any number of processes reads them, one alone too.

A folder of `safetensors` files, some of each process, whose headers say where in the whole tensors their pieces belong.
torch's other format has a pickled index, which is not read here.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
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

    headers: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self.headers is None:
            self.headers = super().read_metadata()
        return self.headers


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


@dataclass(frozen=True)
class Sharding:
    """How a model is held.

    device: where it computes. mesh: [groups, processes of a group]; a group holds the model once, and its processes a
    share each. offload: the shares wait on the CPU, and a block is on the device while it computes.
    """

    device: torch.device
    mesh: DeviceMesh
    offload: bool

    @classmethod
    def over(cls, fsdp: bool | Literal["node"], device: torch.device, *, offload: bool = False) -> Sharding:
        """fsdp: a group is all processes of the run (true), those of one machine (node), or each by itself (false)."""
        if not torch.distributed.is_initialized():  # a process that was started alone
            backend = torch.distributed.get_default_backend_for_device(device)
            # A group of one in this process's memory: no port, which another run might hold.
            torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        world = torch.distributed.get_world_size()
        size = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if fsdp == "node" else world if fsdp else 1
        if world % size:
            raise ValueError(
                f"distributed.fsdp: {world} processes are no multiple of this machine's {size}; write true"
            )
        mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))
        return cls(device, mesh, offload)


def shard(
    model: nn.Module,
    blocks: Collection[nn.Module],
    sharding: Sharding,
    *,
    compute: torch.dtype | None = None,
    whole: Collection[nn.Parameter] | None = None,
) -> None:
    """Shard every block of the model, and then the rest of it. Modules come to the device one at a time.

    whole: parameters that every process keeps all of; None = adapters: those that are trained where others are not.
    The backward pass leaves the mean over the processes of the gradients of what is sharded. compute: the dtype of
    weights that are gathered, None = that of the shares; gradients are summed in float32 then.
    """
    if whole is None:
        trained = [p for p in model.parameters() if p.requires_grad]
        whole = trained if len(trained) < sum(1 for _ in model.parameters()) else []
    ignored = set(whole)
    if sharding.mesh.size() > 1 and any(p.requires_grad and p not in ignored for p in model.parameters()):
        check_torch()
    for parameter in whole:
        parameter.data = parameter.data.to(sharding.device)
    # Pinned memory is copied to a GPU while it computes.
    pinned = sharding.device.type != "cpu"
    waits = CPUOffloadPolicy(pin_memory=pinned) if sharding.offload else OffloadPolicy()
    # Gradients of passes in half precision are summed in float32, or small shares would be rounded away.
    reduced = None if compute is None else torch.float32
    precision = MixedPrecisionPolicy(compute, reduced, cast_forward_inputs=False)
    for module in (*blocks, model):
        # the root too: by default it keeps what it gathered, and a snapshot switched in after that would not be seen
        fully_shard(
            module,
            mesh=sharding.mesh,
            reshard_after_forward=True,
            mp_policy=precision,
            ignored_params=ignored,
            offload_policy=waits,
        )


def reshard_layers(model: Any, *, after_forward: bool) -> None:
    """Whether the blocks of a sharded model drop what they gathered after their forward pass. The rest, which is read
    outside of it too, does so after the backward pass."""
    model.set_reshard_after_forward(after_forward)
    model.set_reshard_after_forward(False, recurse=False)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Within the block this process has all weights of a model that `reshard_layers` was told of, and passes without
    gradient are its own business. All processes enter it together. Nothing is done for a model that is not sharded."""
    held = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not held:
        yield
        return
    reshard_layers(model, after_forward=False)
    for module in held:
        module.unshard()
    try:
        yield
    finally:
        for module in held:
            module.reshard()
        reshard_layers(model, after_forward=True)


def in_step(model: nn.Module) -> bool:
    """Whether processes have to make their passes through it together: to gather its weights, or sum gradients."""
    shares = [p for p in model.parameters() if isinstance(p, DTensor)]
    return any(p.device_mesh.size() > 1 if p.requires_grad else p.device_mesh.size(-1) > 1 for p in shares)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor (a collective), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this process holds, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor | Shares, model: Tensor) -> Tensor:
    """`tensor`, placed and sharded as `model` is."""
    if isinstance(tensor, Shares):
        return tensor.read(torch.empty_like(model, dtype=tensor.dtype, requires_grad=False))
    if isinstance(model, DTensor):  # a share may wait on the CPU, away from its mesh
        return distribute_tensor(tensor, model.device_mesh, model.placements).to(model.device)
    return tensor.to(model.device, copy=True)


def load_optimizer_state(optimizer: torch.optim.Optimizer, tree: dict[str, Any]) -> None:
    """Give it a state that `state_dict` made where its parameters were sharded in the same way or another, or whole."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    per_parameter = {
        index: {
            name: like(value, parameters[index])
            if isinstance(value, Tensor | Shares) and value.shape == parameters[index].shape
            else value
            for name, value in entries.items()
        }
        for index, entries in tree["state"].items()
    }
    optimizer.load_state_dict({**tree, "state": per_parameter})
