"""Full fine-tuning over several processes: FSDP2, which shards in place and keeps every module's class.

Weights, gradients and optimiser state live as shards; a checkpoint holds whole tensors, so that a run may go on with
another number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(denoiser: nn.Module) -> None:
    """Shard every block of the denoiser, and then the rest of it, over all processes.

    Its backward pass leaves the mean over the processes of their gradients.
    """
    blocks = [block for m in denoiser.children() if isinstance(m, nn.ModuleList) for block in m]
    for module in (*blocks, denoiser):
        # the root too: by default it keeps what it gathered, and a snapshot switched in after that would not be seen
        fully_shard(module, reshard_after_forward=True)


def is_sharded(module: nn.Module) -> bool:
    """Whether a forward pass of it is a collective."""
    return isinstance(module, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor (a collective), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this process holds, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """`tensor`, placed and sharded as `model` is."""
    if isinstance(model, DTensor):
        return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements)
    return tensor.to(model.device, copy=True)


def gathered(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` for a checkpoint. Sharded tensors are made whole one at a time (a collective each): on the main process
    they are kept, on the CPU, all others drop them at once and hold nothing of the name. The rest is handed on."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, DTensor):
            found[name] = value
            continue
        tensor = value.full_tensor()
        if torch.distributed.get_rank() == 0:
            found[name] = tensor.cpu()
        del tensor  # before the next one is made
    return found


def whole_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole tensors: a collective where the parameters are sharded, and then, but on the
    main process, without them (see `gathered`)."""
    tree = optimizer.state_dict()
    return {**tree, "state": {index: gathered(entries) for index, entries in tree["state"].items()}}


def load_optimizer_state(optimizer: torch.optim.Optimizer, tree: dict[str, Any]) -> None:
    """The reverse of `whole_optimizer_state`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    per_parameter = {
        index: {
            name: like(value, parameters[index])
            if isinstance(value, Tensor) and value.shape == parameters[index].shape
            else value
            for name, value in entries.items()
        }
        for index, entries in tree["state"].items()
    }
    optimizer.load_state_dict({**tree, "state": per_parameter})
