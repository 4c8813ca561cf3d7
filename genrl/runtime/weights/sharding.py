"""FSDP2, which shards in place and keeps every module's class: over several processes, or with blocks that wait on the
CPU.

With adapters the frozen weights are sharded, and adapters, their gradients and optimiser state are whole in every
process. In full fine-tuning all of them live as shards, and are saved so (`runtime/shares.py`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from genrl.runtime.weights.shares import Shares, check_torch


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
