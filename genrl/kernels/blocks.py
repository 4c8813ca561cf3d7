"""A diffusion transformer's block without its matrix products, as plain torch: what lies between them, which `fused`
compiles, and joint attention by a chosen library.

Each definition computes in float32 (float64 for float64) and rounds where a block stores. For one token x in R^W:

- `qk_norm_rope`: RMS norm of queries or keys, then rotary positions (arXiv 1910.07467, 2104.09864). With W = D, one
  head, or W = H D, all heads together, as in Wan, and w the weight:
      n = w x / sqrt(mean(x^2) + eps)
      y[2i] = n[2i] cos[i] - n[2i+1] sin[i],   y[2i+1] = n[2i] sin[i] + n[2i+1] cos[i]
- `modulated`: LayerNorm and modulation by the timestep (adaLN, arXiv 2212.09748), y = norm(x) (1 + scale) + shift
- `gated`: h = x + gate * branch, and y as `modulated` has it of h

Attention is one function, no mathematics of our own: o = softmax(q k^T / sqrt(D)) v. A back-end that is named runs or
is an error; `auto` is torch's own choice among its exact kernels, which in a run are all but cuDNN's
(`runtime.weights.devices.without_cudnn_attention`). Two back-ends differ by rounding, which clip ranges of 1e-4
notice: one runs in sampling and replay alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from genrl.kernels.machine import AttentionBackend, attention_problem, usable

GRAPHS = 64
"""Shapes of one function: two streams, whole and last micro-batches, training and evaluation, both passes."""


def qk_norm_rope(x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    """x [B, S, H, D] normalised and turned, in its own dtype. weight [D]: each head by itself; [H D]: all heads
    together; None: each head, no scale. cos, sin [S, D/2], one angle per pair of neighbours, or None: no rotation."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    over = (-2, -1) if weight is not None and weight.numel() != x.shape[-1] else (-1,)  # all heads, or each
    n = wide * torch.rsqrt(wide.square().mean(over, keepdim=True) + eps)
    if weight is not None:
        n = n * weight.to(wide.dtype).view(-1, x.shape[-1])
    if cos is not None and sin is not None:
        c, s = cos.to(wide.dtype)[:, None], sin.to(wide.dtype)[:, None]  # [S, 1, D/2], over the heads
        even, odd = n.view(*n.shape[:-1], -1, 2).unbind(-1)
        n = torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)
    return n.to(x.dtype)


def modulated(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """y [B, S, W] in the dtype of x. x [B, S, W]; scale, shift [B, 1, W] or one per token [B, S, W], of any dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = torch.nn.functional.layer_norm(x.to(wide), x.shape[-1:], eps=eps)
    return (normed * (1.0 + scale.to(wide)) + shift.to(wide)).to(x.dtype)


def gated(x: Tensor, branch: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(h, y), both [B, S, W] in the dtype of x: the residual stream, and its normalised and modulated copy. branch
    [B, S, W], gate as scale and shift are in `modulated`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = (x.to(wide) + gate.to(wide) * branch.to(wide)).to(x.dtype)  # rounded before it is normalised, as it is stored
    return h, modulated(h, scale, shift, eps)


def fused(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, both passes compiled, one graph per shape: tensors, None and numbers in, tensors out.

    The forward pass is the graph of a call without gradients in sampling and replay alike, so their ratio is exactly 1:
    torch would compile a call with gradients into another one, which may round differently. The backward pass computes
    it again from the inputs, which are all that is kept.
    """
    if torch.compiler.is_compiling():  # part of a larger graph already
        return function(*inputs)
    return _Fused.apply(function, *inputs)  # type: ignore[no-untyped-call]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *inputs: Any) -> Any:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.function = function
        ctx.others = [None if isinstance(value, Tensor) else (value,) for value in inputs]
        # detached: whether a tensor wants gradients must not choose the graph
        return _call(_compiled(function), *(v.detach() if isinstance(v, Tensor) else v for v in inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors = iter(ctx.saved_tensors)
        inputs = [next(tensors).detach() if other is None else other[0] for other in ctx.others]
        pulled = iter(_call(_compiled(_pulled_back), ctx.function, inputs, grads))
        return None, *(next(pulled) if other is None else None for other in ctx.others)


def _pulled_back(function: Callable[..., Any], inputs: Sequence[Any], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of all tensors among `inputs`, in their order."""
    places = [k for k, value in enumerate(inputs) if isinstance(value, Tensor)]

    def of_tensors(*tensors: Tensor) -> Any:
        arguments = list(inputs)
        for k, tensor in zip(places, tensors, strict=True):
            arguments[k] = tensor
        return function(*arguments)

    # By vjp and not by autograd: one compiled graph holds both passes, so nothing between them is stored.
    outputs, pull, *_ = torch.func.vjp(of_tensors, *(inputs[k] for k in places))
    back: tuple[Tensor, ...] = pull(grads if isinstance(outputs, tuple) else grads[0])
    return back


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # dynamic=False: torch would answer the second shape by a graph for all shapes, with other bits than the first one
    # had.
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


def _call(compiled: Callable[..., Any], *inputs: Any) -> Any:
    """Beyond its limit torch would go on without compiling, in silence, with other bits."""
    from torch._dynamo import config as dynamo  # imported by whoever compiles: two seconds

    with dynamo.patch(recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True):
        return compiled(*inputs)


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
    with nullcontext() if backend == "auto" else sdpa_kernel(OF_TORCH[backend]):
        # torch has heads before tokens
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
