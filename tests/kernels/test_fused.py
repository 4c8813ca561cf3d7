"""The definitions against torch's own norms and complex rotation; compiled, they are themselves in both passes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from genrl.kernels import fused as module
from genrl.kernels.fused import fused, gated, modulated, qk_norm_rope
from tests.kernels.kernel_errors import values_and_gradients


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Graphs as they are compiled, by tracing alone."""
    graphs: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiler))
    module._compiled.cache_clear()
    torch._dynamo.reset()
    yield graphs
    module._compiled.cache_clear()
    torch._dynamo.reset()


def heads_of(batch: int, tokens: int, heads: int, size: int, *, across: bool) -> list[Tensor]:
    """x, weight, cos, sin as `qk_norm_rope` takes them."""
    torch.manual_seed(batch * tokens + size)
    x, angle = torch.randn(batch, tokens, heads, size), torch.randn(tokens, size // 2)
    return [x, 1.0 + 0.3 * torch.randn(heads * size if across else size), angle.cos(), angle.sin()]


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.sampled_from([2, 6, 16]), st.booleans())
def test_rms_norm_then_complex_rotation(batch: int, tokens: int, heads: int, size: int, across: bool) -> None:
    x, weight, cos, sin = heads_of(batch, tokens, heads, size, across=across)
    normed = torch.nn.functional.rms_norm(x.flatten(2) if across else x, weight.shape, weight, 1e-6).view(x.shape)
    turned = torch.view_as_complex(normed.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)[:, None]
    found = qk_norm_rope(x, weight, cos, sin, 1e-6)
    torch.testing.assert_close(found, torch.view_as_real(turned).flatten(-2), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5])
def test_gate_residual_norm_and_modulation(tokens: int) -> None:
    x, branch = torch.randn(2, 3, 5, 8)
    gate, scale, shift = torch.randn(3, 3, tokens, 8)
    h, y = gated(x, branch, gate, scale, shift, 1e-6)
    torch.testing.assert_close(h, x + gate * branch)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(h, (8,), eps=1e-6) * (1 + scale) + shift)
    assert torch.equal(y, modulated(h, scale, shift, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_they_are_themselves_and_one_graph_a_pass(dtype: torch.dtype, counted: list[Any]) -> None:
    torch.manual_seed(0)
    x, branch = torch.randn(2, 3, 5, 8, dtype=dtype)
    rows = [x, branch, *torch.randn(3, 3, 1, 8, dtype=dtype)]
    calls = {gated: rows, modulated: [x, *rows[3:]], qk_norm_rope: heads_of(2, 5, 3, 4, across=True)}
    for function, inputs in calls.items():
        before = len(counted)
        plain = values_and_gradients(lambda *given, f=function: f(*given, 1e-6), inputs)
        found = values_and_gradients(lambda *given, f=function: fused(f, *given, 1e-6), inputs)
        torch.testing.assert_close(found, plain)
        with torch.no_grad():  # sampling runs the graph that training ran
            again = fused(function, *inputs, 1e-6)
        first = again[0] if isinstance(again, tuple) else again
        assert torch.equal(first, found[0]) and len(counted) == before + 2


def test_a_call_without_weight_or_rotation(counted: list[Any]) -> None:
    x = torch.randn(1, 4, 2, 6, requires_grad=True)
    fused(qk_norm_rope, x, None, None, None, 1e-6).square().sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_shapes_that_change_with_every_call_are_an_error(counted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRAPHS", 2)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for rows in range(1, 5):
            fused(modulated, torch.ones(rows, 2, 4), *torch.ones(2, rows, 1, 4), 1e-6)
