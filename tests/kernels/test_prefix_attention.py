"""All back-ends against the definition, values and gradients; the definition against plain attention row by row."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from genrl.kernels import blocks, machine
from genrl.kernels import blocks as module
from genrl.kernels.blocks import fused, gated, modulated, qk_norm_rope
from genrl.kernels.prefix_attention import prefix_attention, prefix_attention_torch
from genrl.runtime.weights.devices import without_cudnn_attention
from tests.kernels.kernel_errors import DEVICES, DTYPES, assert_as_exact, values_and_gradients


def example(*, rows: int = 4, prefixes: int = 2, length: int = 19, prefix: int = 23, heads: int = 4, inner: int = 2,
            size: int = 24, masked: bool = True, device: str = "cpu"):  # fmt: skip
    torch.manual_seed(rows * length)
    query = torch.randn(rows, heads, length, size)
    key, value = torch.randn(2, rows, inner, length, size)
    prefix_key, prefix_value = torch.randn(2, prefixes, inner, prefix, size)
    row_of = torch.randint(prefixes, (rows,))
    mask = None
    if masked:  # padded on the left, as prompts are
        mask = torch.arange(prefix)[None] >= torch.randint(0, prefix, (prefixes, 1))
    given = (query, key, value, prefix_key, prefix_value, row_of, mask)
    return [None if t is None else t.to(device) for t in given]


def calls(row_of, mask, *, causal: bool, backend: str = "sdpa"):
    def kernel(*tensors):
        return prefix_attention(*tensors, row_of=row_of, prefix_mask=mask, causal=causal, backend=backend)

    def definition(*tensors):
        return prefix_attention_torch(*tensors, row_of, mask, causal, tensors[0].shape[-1] ** -0.5)

    return kernel, definition


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_rows_of_padded_prefixes(dtype: torch.dtype, device: str) -> None:
    *tensors, row_of, mask = example(device=device)
    kernel, definition = calls(row_of, mask, causal=True)
    assert_as_exact(kernel, definition, tensors, dtype)


def test_rows_that_see_all_of_themselves_and_cross_attention_to_a_shared_text() -> None:
    *tensors, row_of, mask = example(rows=3, prefixes=1, length=7, prefix=17, size=16, masked=False)
    kernel, definition = calls(row_of, mask, causal=False)
    assert_as_exact(kernel, definition, tensors, torch.float32)
    query, _, _, key, value, row_of, mask = example(rows=4, length=18, prefix=9, heads=2)
    kernel, definition = calls(row_of, mask, causal=True)
    assert_as_exact(kernel, definition, [query, None, None, key, value], torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_flex(causal: bool, device: str) -> None:
    *tensors, row_of, mask = example(rows=3, length=7, prefix=11, size=16, device=device)
    kernel, definition = calls(row_of, mask, causal=causal, backend="flex")
    if device == "cuda":
        return assert_as_exact(kernel, definition, tensors, torch.float32)
    torch.testing.assert_close(kernel(*tensors), definition(*tensors), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="no backward on the CPU"):
        kernel(tensors[0].requires_grad_(), *tensors[1:])


def test_definition_is_attention_of_each_row_alone() -> None:
    query, key, value, prefix_key, prefix_value, row_of, mask = example()
    how = {"row_of": row_of, "prefix_mask": mask, "backend": "torch"}
    result = prefix_attention(query, key, value, prefix_key, prefix_value, **how)
    for r, n in enumerate(row_of.tolist()):
        keys = torch.cat([prefix_key[n, :, mask[n]], key[r]], 1)
        values = torch.cat([prefix_value[n, :, mask[n]], value[r]], 1)
        for t in (0, 3, 18):
            count = int(mask[n].sum()) + t + 1
            alone = torch.nn.functional.scaled_dot_product_attention(
                query[r, :, t : t + 1],
                keys[:, :count].repeat_interleave(2, 0),
                values[:, :count].repeat_interleave(2, 0),
            )
            torch.testing.assert_close(result[r, :, t : t + 1], alone, atol=1e-5, rtol=1e-5)


def test_shapes_that_do_not_fit() -> None:
    query, key, value, prefix_key, prefix_value, row_of, _ = example()
    with pytest.raises(ValueError, match="heads a multiple"):
        prefix_attention(query[:, :3], key, value, prefix_key, prefix_value, row_of=row_of)
    with pytest.raises(ValueError, match="key must be"):
        prefix_attention(query, key, None, prefix_key, prefix_value, row_of=row_of)
    with pytest.raises(ValueError, match="must be torch, sdpa or flex"):
        prefix_attention(query, key, value, prefix_key, prefix_value, row_of=row_of, backend="flash")


# -- Attention by a library that is named: it runs, or is an error


def test_joint_attention_is_softmax_attention_under_its_mask() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 7, 3, 8)
    mask = (torch.arange(7)[None] < torch.tensor([[7], [4]]))[:, None, None]
    exact = softmax_attention(q, k, v, torch.where(mask, 0.0, -torch.inf))
    for name in machine.usable(q, mask):
        result = blocks.joint_attention(q, k, v, mask=mask, backend=name)
        torch.testing.assert_close(result, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is missing here may be there")
def test_a_named_attention_that_cannot_run_is_an_error_and_flash_takes_no_mask() -> None:
    q = torch.randn(1, 4, 2, 8)
    says = r"attention back-end cudnn: .*needs a GPU and the tensors are on cpu.*; that can run here: auto, math"
    with pytest.raises(ValueError, match=says):
        blocks.joint_attention(q, q, q, backend="cudnn")
    problem = machine.attention_problem("flash", torch.device("cpu"), torch.float32, masked=True)
    assert problem == "it takes no mask, and this model pads its texts"
    with pytest.raises(ValueError, match="must be one of auto, math, .* not 'fa2'"):
        machine.attention_problem("fa2", torch.device("cpu"), torch.float32, False)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5 + bias
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)


def test_a_gradient_comes_back_contiguous() -> None:
    """Of a slice of a wider tensor, as FLUX.1's single blocks have it."""
    seen: list[Tensor] = []
    x = torch.randn(2, 3, 4, requires_grad=True)
    doubled = 2 * x
    doubled.register_hook(seen.append)
    torch.cat([blocks._Contiguous.apply(doubled), x], 2)[..., :4].sum().backward()  # type: ignore[no-untyped-call]
    assert seen[0].is_contiguous() and torch.equal(x.grad, torch.full_like(x, 2.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["auto", "cudnn"])
def test_gradients_of_two_layouts_are_right_one_after_the_other(name: str) -> None:
    """One shape, whose gradient is a tensor of its own and then a slice of a wider one, and the other way round."""
    without_cudnn_attention()  # as every run does
    torch.manual_seed(0)
    rows = torch.randn(3, 2, 768, 24, 128, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(2, 768, 24 * 128 + 512, device="cuda", dtype=torch.bfloat16)
    for of_wider in (False, True, False):
        result = {}
        for backend_name in (name, "math"):
            leaves = [row.clone().requires_grad_() for row in rows]
            out = blocks.joint_attention(*leaves, backend=backend_name).flatten(2)  # type: ignore[arg-type]
            joined = torch.cat([out, wide[..., out.shape[2] :]], 2) if of_wider else out
            result[backend_name] = torch.autograd.grad(joined, leaves, wide[..., : joined.shape[2]].contiguous())
        for ours, exact in zip(result[name], result["math"], strict=True):
            torch.testing.assert_close(ours, exact, atol=2e-2, rtol=2e-2)


def test_what_is_chosen_breaks_no_compiled_graph(counted: list[Any]) -> None:
    def block(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q = fused(qk_norm_rope, x, weight, None, None, 1e-6)
        h = blocks.joint_attention(q, q, x).flatten(2)
        y: torch.Tensor = fused(modulated, h, scale, scale, 1e-6)
        return y

    inputs = torch.randn(2, 5, 2, 8), torch.ones(8), torch.randn(2, 1, 16)
    whole = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(whole(*inputs), block(*inputs))


# -- The definitions against torch's own norms and complex rotation; compiled, they are themselves in both passes


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
    result = qk_norm_rope(x, weight, cos, sin, 1e-6)
    torch.testing.assert_close(result, torch.view_as_real(turned).flatten(-2), atol=2e-6, rtol=1e-5)


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
        result = values_and_gradients(lambda *given, f=function: fused(f, *given, 1e-6), inputs)
        torch.testing.assert_close(result, plain)
        with torch.no_grad():  # sampling runs the graph that training ran
            again = fused(function, *inputs, 1e-6)
        first = again[0] if isinstance(again, tuple) else again
        assert torch.equal(first, result[0]) and len(counted) == before + 2
    heads = torch.randn(1, 4, 2, 6, requires_grad=True)
    fused(qk_norm_rope, heads, None, None, None, 1e-6).square().sum().backward()  # neither weight nor rotation
    assert heads.grad is not None and bool(heads.grad.isfinite().all())


def test_shapes_that_change_with_every_call_are_an_error(counted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRAPHS", 2)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for rows in range(1, 5):
            fused(modulated, torch.ones(rows, 2, 4), *torch.ones(2, rows, 1, 4), 1e-6)
