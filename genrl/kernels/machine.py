"""What can compute kernels on this machine. Nothing is compiled here, so torch's compiler is not imported either."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Literal, get_args

import torch
from torch import Tensor

AttentionBackend = Literal["auto", "math", "efficient", "cudnn", "flash"]
"""auto: torch chooses, in a run not cudnn; the others: that kernel of torch."""


def compile_problem(device: torch.device) -> str | None:
    """Why torch cannot compile for this device; None where it can."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "there is no C++ compiler (g++ or clang++)"
    return None


def attention_problem(backend: AttentionBackend, device: torch.device, dtype: torch.dtype, masked: bool) -> str | None:
    """Why `backend` cannot attend with tensors of this kind, None where it can; ValueError for an unknown name."""
    if backend not in get_args(AttentionBackend):
        raise ValueError(f"attention back-end must be one of {', '.join(get_args(AttentionBackend))}, not {backend!r}")
    if backend in ("auto", "math"):
        return None
    if device.type != "cuda" and not (backend == "flash" and device.type == "cpu"):
        return f"it needs a GPU and the tensors are on {device.type}"
    if backend == "cudnn" and dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')} (see model.dtype)"
    if masked and backend == "flash":
        return "it takes no mask, and this model pads its texts"
    return None


def usable(like: Tensor, mask: Tensor | None = None) -> list[str]:
    """Back-ends that can attend with tensors such as `like` [B, S, H, D]; mask as in `joint_attention`."""
    names = get_args(AttentionBackend)
    return [name for name in names if attention_problem(name, like.device, like.dtype, mask is not None) is None]
