"""The tolerance of every kernel: twice the error that torch itself makes in that dtype, against float64."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
DTYPES = [torch.float32, *(pytest.param(half, marks=pytest.mark.slow) for half in (torch.bfloat16, torch.float16))]

Call = Callable[..., Tensor | tuple[Tensor, ...]]


def values_and_gradients(call: Call, inputs: Sequence[Tensor | None], seed: int = 0) -> list[Tensor]:
    """Outputs of `call(*inputs)`, then the gradients of a random projection of them to each floating input."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) if t is not None else None for t in inputs]
    outputs = call(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for one in outputs:
        weight = torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one)
        total = total + (one.double() * weight.double()).sum().cpu()
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    gradients = torch.autograd.grad(total, wanted, allow_unused=True)
    return [t.detach().cpu() for t in (*outputs, *gradients) if t is not None]


def assert_as_exact(kernel: Call, definition: Call, inputs: Sequence[Tensor | None], dtype: torch.dtype) -> None:
    """Values and gradients of `kernel`, inputs rounded to `dtype`, are as near to float64 as twice the definition's."""
    low = [t.to(dtype) if t is not None and t.is_floating_point() else t for t in inputs]
    high = [t.double() if t is not None and t.is_floating_point() else t for t in low]
    calls = ((kernel, low), (definition, low), (definition, high))
    result, own, exact = (values_and_gradients(call, inputs) for call, inputs in calls)
    assert len(result) == len(own) == len(exact)
    for number, (f, o, e) in enumerate(zip(result, own, exact, strict=True)):
        assert f.dtype == o.dtype and f.shape == o.shape, number
        limit = 2 * (o.double() - e).abs().max() + 2 * torch.finfo(dtype).eps * e.abs().max()
        error = (f.double() - e).abs().max()
        assert error <= limit, f"output {number}: error {error:.2e}, allowed {limit:.2e}"
