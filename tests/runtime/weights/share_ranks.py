"""What the processes of the tests of checkpoints in shares run."""

import json
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from genrl.runtime.folder import checkpoint
from genrl.runtime.weights import sharding
from genrl.runtime.weights.sharding import like
from tests.run_folders import group

SHAPES = {"matrix": (7, 3), "vector": (4,), "one": (1, 5), "wide": (16, 32)}
STATE = {"lr": 0.1}


def wholes(step: int) -> dict[str, dict[str, Tensor]]:
    """The tensors of the checkpoint after `step`, none of them in shares."""
    chance = torch.Generator().manual_seed(step)
    weights = {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}
    half = {"half/0": torch.randn(6, 2, generator=chance).bfloat16()}
    return {"weights": weights, "optimizer": half | {"count": torch.tensor(float(step))}, "kept-a": {}}


def in_shares(step: int, groups: int = 1) -> dict[str, dict[str, Tensor]]:
    """The same, in shares of all processes, or of those of each group; but for a scalar, which is whole."""
    size = torch.distributed.get_world_size() // groups
    mesh = init_device_mesh("cpu", (groups, size), mesh_dim_names=("replicate", "shard"))
    return {
        stem: {n: distribute_tensor(t, mesh, [Replicate(), Shard(0)]) if t.dim() else t for n, t in named.items()}
        for stem, named in wholes(step).items()
    }


def save_step(folder: Path, step: int, *, groups: int = 1, replace: bool = False, keep: int = 2) -> None:
    tensors = in_shares(step, groups)
    if torch.distributed.get_rank():
        checkpoint.save_shares(tensors)
    else:
        checkpoint.save(folder, step, tensors=tensors, state=STATE, keep=keep, replace=replace)
    torch.distributed.barrier()


def saves(folder: str, steps: list[int], groups: int, file_bytes: int, replace: bool) -> None:
    """Checkpoints after these steps."""
    sharding.FILE_BYTES = file_bytes
    with group():
        for step in steps:
            save_step(Path(folder), step, groups=groups, replace=replace)


def reads(path: str, out: str) -> None:
    """Read a checkpoint into the shares of so many processes as there are; to `out`/<rank>.json what differs, and the
    numbers that were read in full."""
    with group() as rank:
        loaded, wrong = checkpoint.load(Path(path), in_shares=True), []
        wanted = in_shares(loaded.step)
        for stem, named in wanted.items():
            for name, tensor in named.items():
                actual = loaded.tensors[stem][name]
                if isinstance(tensor, DTensor):
                    actual = like(actual, tensor)
                    assert isinstance(actual, DTensor) and actual.placements == tensor.placements
                    actual, tensor = actual.to_local(), tensor.to_local()
                if actual.dtype != tensor.dtype or not torch.equal(actual, tensor):
                    wrong.append(f"{stem}: {name}")
        (Path(out) / f"{rank}.json").write_text(json.dumps(wrong))


def fails(folder: str, rank: int, operation: str, dies: bool) -> None:
    """Save step 3, where a process has no space left, or dies, at this file operation."""
    with group() as here:

        def fault(name: str) -> None:
            if here == rank and name == operation:
                if dies:
                    os._exit(9)
                raise OSError(28, "No space left on device")

        checkpoint._fault = fault
        save_step(Path(folder), 3, keep=1)


def operations(folder: str, out: str) -> None:
    """The file operations of each process in the save of step 3, to `out`/<rank>.json."""
    seen: list[str] = []
    checkpoint._fault = seen.append
    with group() as rank:
        save_step(Path(folder), 3, keep=1)
    (Path(out) / f"{rank}.json").write_text(json.dumps(seen))
