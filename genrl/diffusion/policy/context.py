"""Context parallelism: several processes compute each sample together, each a part of its tokens (Ulysses, arXiv
2309.14509: in attention each has all tokens of some heads), by diffusers.

Every process has the whole output, and the gradient of its part of the tokens: over all processes these are summed, as
those of different samples are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import torch
from diffusers import ContextParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from genrl.diffusion.config.context_rules import DIVIDED, KEY
from genrl_rewards.models.accounts import collected


def divide(denoisers: Mapping[str, nn.Module], replicas: int, device: torch.device) -> None:
    """Have every group of processes, of which there are `replicas`, compute the tokens of its samples together, from
    here on. Raises ValueError for a denoiser of which diffusers divides none."""
    context = torch.distributed.get_world_size() // replicas
    mesh = init_device_mesh(device.type, (replicas, 1, context), mesh_dim_names=("replica", "ring", "ulysses"))
    for name, denoiser in denoisers.items():
        if not any(one.__name__ in DIVIDED for one in type(denoiser).mro()):  # FSDP makes a subclass of it
            raise ValueError(f"{KEY}: the tokens of a {type(denoiser).__name__} ({name}) are not divided; write 1")
        settings = ContextParallelConfig(ulysses_degree=context, mesh=mesh["ring", "ulysses"])
        with collected([]), _one_device_each(device):  # that it is experimental, which the page says
            denoiser.enable_parallelism(config=settings)  # type: ignore[operator]


@contextmanager
def _one_device_each(device: torch.device) -> Iterator[None]:
    """diffusers asks for the accelerators of a machine, of which one without has not one to divide by."""
    if device.type != "cpu":
        yield
        return
    with patch("torch.accelerator.device_count", lambda: 1), patch("torch._C._get_accelerator", lambda: device):
        yield
