"""Joint attention of a diffusion transformer by a chosen library. One function, no mathematics of our own:

    o = softmax(q k^T / sqrt(D)) v

A back-end that is named runs or is an error; `auto` is torch's own choice among its exact kernels, which in a run are
all but cuDNN's (`runtime.devices.without_cudnn_attention`). Two back-ends differ by rounding, which clip ranges of 1e-4
notice: one runs in sampling and replay alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from genrl.kernels.machine import PACKAGES, AttentionBackend, attention_problem, usable

OF_TORCH = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}


_problem = torch.compiler.assume_constant_result(attention_problem)
"""A compiled graph holds the answer alone."""


def joint_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, backend: AttentionBackend = "auto"
) -> Tensor:
    """query, key, value [B, S, H, D] -> [B, S, H, D]; mask bool, broadcastable to [B, H, S, S], or None.

    Raises ValueError where a named back-end cannot run on these tensors, with the reason and what can.
    """
    problem = _problem(backend, query.device, query.dtype, mask is not None)
    if problem is not None:
        raise ValueError(
            f"attention back-end {backend}: {problem}; that can run here: {', '.join(usable(query, mask))} "
            "(kernels.attention)"
        )
    if backend in PACKAGES:
        output: Tensor = _library(backend)(query, key, value, mask)
        return output
    with nullcontext() if backend == "auto" else sdpa_kernel(OF_TORCH[backend]):
        # torch has heads before tokens; the packages have them as they come.
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    return _Contiguous.apply(out) if backend == "cudnn" else out  # type: ignore[no-untyped-call]


class _Contiguous(torch.autograd.Function):
    """Hands a contiguous gradient back. torch keeps cuDNN's plans by the layouts of query, key and value alone and runs
    the backward plan of one gradient's layout on a gradient of another (torch 2.11 on an H200, docs/gpu.md)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x of any shape, as it is."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """grad in the shape of x."""
        return grad.contiguous()


@functools.cache
def _library(backend: str) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Any]:
    """The call of a package, each by its own conventions."""
    if backend == "flash2":
        from flash_attn import flash_attn_func

        return lambda q, k, v, mask: flash_attn_func(q, k, v)
    if backend == "flash3":
        from flash_attn_interface import flash_attn_func as flash3

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
            output = flash3(q, k, v)
            return output[0] if isinstance(output, tuple) else output  # with the log-sum-exp, in its first releases

        return attend
    from xformers.ops import memory_efficient_attention

    def efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        if mask is None:
            return memory_efficient_attention(q, k, v)
        keys = k.shape[1]  # rows of a bias begin at multiples of 8
        bias = q.new_zeros(len(q), q.shape[2], q.shape[1], -(-keys // 8) * 8)[..., :keys]
        return memory_efficient_attention(q, k, v, attn_bias=bias.masked_fill_(~mask, float("-inf")))

    return efficient
