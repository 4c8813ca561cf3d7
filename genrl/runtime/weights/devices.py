"""Which device computes, and its memory: by torch's own interface, so that CUDA, ROCm (which torch calls cuda) and XPU
are one. What a device's module lacks is asked of nothing.

Never run on XPU or MPS hardware; a Mac's GPU (mps) is taken where GENRL_DEVICE=mps asks for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

VARIABLE = "GENRL_DEVICE"
NOT_BY_ITSELF = ("mps",)
"""Has no float64, and nobody has tried it: asked for by name only."""


def default_device() -> str:
    """The type of the accelerator that is at hand, else "cpu"; or what the environment variable GENRL_DEVICE names.

    Raises ValueError where it names one that is not there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = "cpu" if accelerator is None else accelerator.type
    requested = os.environ.get(VARIABLE)
    if requested is None:
        return "cpu" if here in NOT_BY_ITSELF else here
    if requested not in ("cpu", here):
        raise ValueError(
            f"{VARIABLE}={requested}: there is no such device here; leave it out, or write one of cpu, {here}"
        )
    return requested


def without_cudnn_attention() -> None:
    """Leave cuDNN's kernel out of what torch chooses from for attention: with two layouts of gradients for one shape,
    as FLUX.1's two kinds of blocks have them, its gradients had errors hundreds of times those of rounding, or it ended
    the process (torch 2.11 on an H200, in docs/gpu.md). `kernels.attention: cudnn` names it where it is safe."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def use_tf32(wanted: bool | None) -> None:
    """Whether a GPU rounds what float32 matrix products and convolutions read to TF32, 10 bits of mantissa, as long as
    this process lives; None: as torch has it, which rounds in convolutions alone."""
    if wanted is not None:
        torch.backends.cuda.matmul.allow_tf32 = wanted
        torch.backends.cudnn.allow_tf32 = wanted


@contextmanager
def tf32(wanted: bool | None) -> Iterator[None]:
    """`use_tf32`, and at the end as it was: what a script does after a run is none of the run's business. None reads
    nothing either: torch refuses to tell by these names what was set by its newer ones (`fp32_precision`)."""
    if wanted is None:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    use_tf32(wanted)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def accelerators() -> list[torch.device]:
    """All accelerators of this machine: cuda:0, cuda:1 ..."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return (
        []
        if accelerator is None
        else [torch.device(accelerator.type, k) for k in range(torch.accelerator.device_count())]
    )


def empty_cache(device: torch.device) -> None:
    """Give memory that is cached and unused back to the device."""
    _call(device, "empty_cache")


def reset_peak(device: torch.device) -> None:
    """Begin to measure `peak_bytes` anew."""
    _call(device, "reset_peak_memory_stats", device)


def peak_bytes(device: torch.device) -> int:
    """Most bytes of the device that tensors of this process held at a time; 0 where it does not say."""
    return int(_call(device, "max_memory_allocated", device) or 0)


def total_bytes(device: torch.device) -> int | None:
    """Memory of the device; None where it does not say."""
    free_and_total = _call(device, "mem_get_info", device)
    return None if free_and_total is None else int(free_and_total[1])


def resident_peak_bytes() -> int:
    """Most memory that this process held since its start, beside devices."""
    try:
        import resource
    except ImportError:  # Windows
        return int(psutil.Process().memory_info().peak_wset)
    # macOS counts bytes, Linux KiB.
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _call(device: torch.device, name: str, *given: Any) -> Any:
    if device.type == "cpu":
        return None
    function = getattr(torch.get_device_module(device.type), name, None)
    return None if function is None else function(*given)
