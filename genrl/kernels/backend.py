"""Which implementation of a kernel runs, and saying so: a line in the log for each answer, no silent fallback."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]
"""auto: the best that can run on the tensors at hand; the others: that one, or a ValueError."""

KERNELS = ("prefix_attention", "qk_norm_rope", "adaln", "sde_step")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

FUSION = {"enable_fp_fusion": True}
"""Products and sums may be contracted, said to every compilation: the default differs between releases of Triton."""

logger = logging.getLogger(__name__)


def interprets() -> bool:
    """Whether Triton kernels are interpreted (TRITON_INTERPRET=1 before the first import): tests without a GPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def triton_problem(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on tensors of this device; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'genrl[kernels]')"
    if device.type != "cuda" and not interprets():
        return f"Triton needs a GPU and the tensors are on {device.type}"
    return None


def choose(kernel: str, x: Tensor, backend: Backend = "auto") -> Literal["torch", "triton"]:
    """What computes `kernel` on tensors like `x`; logged once per answer.

    auto on the CPU is always torch: the interpreter is for tests, which name it. Raises ValueError where triton is
    named and cannot run, or for an unknown name.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"kernel {kernel}: back-end must be auto, torch or triton, not {backend!r}")
    if backend == "torch":
        return _said(kernel, "torch", "asked for")
    problem = triton_problem(x.device)
    if problem is None and x.dtype not in DTYPES:
        problem = f"it computes in float32, and the tensors are {str(x.dtype).removeprefix('torch.')}"
    if backend == "triton":
        if problem is not None:
            raise ValueError(f"kernel {kernel}: the back-end triton was asked for, but {problem}; use auto or torch")
        return _said(kernel, "triton", "interpreted" if interprets() else "asked for")
    if problem is None and x.device.type == "cpu":
        problem = "its interpreter is for tests"
    return _said(kernel, "torch", f"no Triton: {problem}") if problem else _said(kernel, "triton", "best available")


def summary() -> dict[str, str]:
    """Kernel -> what `auto` would run on this machine and why, for `genrl doctor`."""
    problem = triton_problem(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if problem is None and not torch.cuda.is_available():
        problem = "its interpreter is for tests"
    return {name: f"torch (no Triton: {problem})" if problem else "triton" for name in KERNELS}


@functools.cache
def _said(kernel: str, chosen: Literal["torch", "triton"], why: str) -> Literal["torch", "triton"]:
    logger.info("kernel %s: %s (%s)", kernel, chosen, why)
    return chosen


@functools.cache
def say_once(text: str) -> None:
    """A line of the log that is worth reading once."""
    logger.info(text)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` compiled by torch, once: what a kernel has to beat."""
    return _compile(function)


@functools.cache
def _compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    made: Callable[..., Tensor] = torch.compile(function, dynamic=False)
    return made
