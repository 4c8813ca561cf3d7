"""Which implementation of a kernel runs, and saying so: a line in the log for each answer, no silent fallback."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from genrl.kernels.machine import interprets, triton_problem

Backend = Literal["auto", "torch", "triton"]
"""auto: the best that can run on the given tensors; the others: that one, or a ValueError."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

FUSION = {"enable_fp_fusion": True}
"""Products and sums may be contracted, said to every compilation: the default differs between releases of Triton."""

logger = logging.getLogger(__name__)


class TooManyGraphs(RuntimeError):
    """A compiled model was compiled again and again: its inputs change from call to call."""


def choose(kernel: str, x: Tensor, backend: Backend = "auto", *, instead: str = "torch") -> Literal["torch", "triton"]:
    """What computes `kernel` on tensors like `x` (of any shape); logged once per answer, as a warning where it is not
    Triton.

    auto on the CPU is always torch: the interpreter is for tests, which name it. instead: what the torch form is called
    in the log. Raises ValueError where triton is named and cannot run, or for an unknown name.
    """
    chosen: Literal["torch", "triton"] = _constant(kernel, x.device, x.dtype, backend, instead)
    return chosen


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant(*question: Any) -> Any:
    """A compiled graph holds the answer alone."""
    return _chosen(*question)


@functools.cache
def _chosen(
    kernel: str, device: torch.device, dtype: torch.dtype, backend: Backend, instead: str
) -> Literal["torch", "triton"]:
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"kernel {kernel}: back-end must be auto, torch or triton, not {backend!r}")
    if backend == "torch":
        logger.info("kernel %s: torch (asked for)", kernel)
        return "torch"
    problem = triton_problem(device)
    if problem is None and dtype not in DTYPES:
        problem = f"it computes in float32, and the tensors are {str(dtype).removeprefix('torch.')}"
    if problem is None and device.type == "cpu" and backend == "auto":
        problem = "its interpreter is for tests"
    if problem is None:
        why = "interpreted" if interprets() else "asked for" if backend == "triton" else "the best available"
        logger.info("kernel %s: triton (%s)", kernel, why)
        return "triton"
    if backend == "triton":
        raise ValueError(f"kernel {kernel}: the back-end triton was asked for, but {problem}; use auto or torch")
    logger.warning("kernel %s: %s (no Triton: %s)", kernel, instead, problem)
    return "torch"


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled by torch, once."""
    made: Callable[..., Any] = torch.compile(function, dynamic=False)
    return made
