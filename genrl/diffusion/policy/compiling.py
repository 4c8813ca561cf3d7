"""The denoiser compiled by torch (`kernels.compile`): the same graph in sampling and in replay.

Torch compiles a call with gradients and one without into two graphs, which may round differently, and clip ranges of
1e-4 notice. So calls without gradients run the graph of those with them and let go of what it kept: one graph for
both, and half the time of compilation. Graphs are of one shape each: a general one that is made later could take the
place of the one that sampled.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from diffusers import ContextParallelConfig
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from genrl.diffusion.config.model_rules import CONTEXT, DIVIDED
from genrl.kernels.machine import compile_problem
from genrl_rewards.models.accounts import collected

MOST = 16
"""Calls of a denoiser that may have to be compiled: those of training and evaluation, whole and last micro-batches,
with the adapter and without, and a few segments of trees."""

logger = logging.getLogger(__name__)


class TooManyGraphs(RuntimeError):
    """A compiled model was compiled again and again: its inputs change from call to call."""


_times: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How often each denoiser was compiled."""


def compile_denoisers(
    denoisers: Iterable[nn.Module], *, cuda_graphs: bool = False, say: Callable[[str], None] = logger.info
) -> None:
    """Compile the forward passes of denoisers in place; classes, hooks and names of parameters stay. `say` is told of
    each compilation. cuda_graphs: record their launches too; then no model call may come between one with gradients and
    its backward pass, and parameters have to stay where they are (`Weights.by_copy`).

    Raises ValueError where torch cannot compile for their device.
    """
    for denoiser in denoisers:
        device = next(denoiser.parameters()).device
        problem = compile_problem(device)
        if cuda_graphs and device.type != "cuda":
            problem = f"CUDA graphs are of GPUs, and the model is on {device.type}"
        if problem is not None:
            raise ValueError(f"kernels.compile: {problem}; write kernels.compile: false")
        denoiser.forward = _one_graph(denoiser, cuda_graphs, say)


def start_over(denoisers: Iterable[nn.Module]) -> None:
    """Drop the graphs of these denoisers, with the memory of recorded ones, and count anew: micro-batches have another
    size from here on."""
    torch.compiler.reset()
    for denoiser in denoisers:
        # The limit is one of a size of micro-batches.
        _times[denoiser] = 0


def _one_graph(denoiser: nn.Module, cuda_graphs: bool, say: Callable[[str], None]) -> Callable[..., Any]:
    name = type(denoiser).__name__
    _times[denoiser] = 0
    run = torch.compile(denoiser.forward, dynamic=False, mode="reduce-overhead" if cuda_graphs else None)

    @functools.wraps(denoiser.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if cuda_graphs and torch.is_grad_enabled():
            for parameter in denoiser.parameters():  # a first gradient would stay where the graph is to write again
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        # torch says nowhere that a call compiled; its own count of graphs does.
        graphs, began = counters["stats"]["unique_graphs"], time.perf_counter()
        # beyond its limit torch would go on without compiling, in silence
        with torch.enable_grad(), dynamo.patch(recompile_limit=4 * MOST, fail_on_recompile_limit_hit=True):
            output = run(*args, **kwargs)
        if counters["stats"]["unique_graphs"] > graphs:
            times = _times[denoiser] = _times[denoiser] + 1
            say(f"{name} compiled in {time.perf_counter() - began:.0f} s ({times} of at most {MOST} times)")
            if times > MOST:
                raise TooManyGraphs(
                    f"kernels.compile: {name} was compiled {times} times, the last time for {_shapes(args, kwargs)}: "
                    "its inputs change from call to call (lengths of texts, rows of trees, a number that depends on "
                    "the step). Make them the same, or write kernels.compile: false"
                )
        if not torch.is_grad_enabled():
            # The next run of a recorded graph writes into the same memory, so that its outputs are copied.
            output = pytree.tree_map_only(Tensor, torch.clone if cuda_graphs else torch.detach, output)
            if cuda_graphs:  # no backward pass is to come, so the next call may write over this one's memory
                torch.compiler.cudagraph_mark_step_begin()
        return output

    return forward


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    named = [(str(k), value) for k, value in enumerate(args)] + list(kwargs.items())
    return ", ".join(f"{name} {list(value.shape)}" for name, value in named if isinstance(value, Tensor))


def divide(denoisers: Mapping[str, nn.Module], replicas: int, device: torch.device) -> None:
    """Have every group of processes, of which there are `replicas`, compute the tokens of its samples together, from
    here on. Raises ValueError for a denoiser of which diffusers divides none."""
    # `ring` stays 1: ulysses exchanges heads for tokens, and every attention is then of whole sequences.
    context = torch.distributed.get_world_size() // replicas
    mesh = init_device_mesh(device.type, (replicas, 1, context), mesh_dim_names=("replica", "ring", "ulysses"))
    for name, denoiser in denoisers.items():
        if not any(base.__name__ in DIVIDED for base in type(denoiser).mro()):  # FSDP makes a subclass of it
            raise ValueError(f"{CONTEXT}: the tokens of a {type(denoiser).__name__} ({name}) are not divided; write 1")
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
