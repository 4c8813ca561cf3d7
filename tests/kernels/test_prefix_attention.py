"""All back-ends against the definition, values and gradients; the definition against plain attention row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrl.kernels import prefix_attention as prefix
from genrl.kernels.prefix_attention import prefix_attention, prefix_attention_torch, slots
from tests.kernels.kernel_errors import DEVICES, DTYPES, assert_as_exact, needs_triton

BACKENDS = ["sdpa", pytest.param("triton", marks=needs_triton)]


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


def calls(row_of, mask, *, backend: str, causal: bool):
    def kernel(*tensors):
        return prefix_attention(*tensors, row_of=row_of, prefix_mask=mask, causal=causal, backend=backend)

    def definition(*tensors):
        return prefix_attention_torch(*tensors, row_of, mask, causal, tensors[0].shape[-1] ** -0.5)

    return kernel, definition


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_rows_of_padded_prefixes(backend: str, dtype: torch.dtype, device: str) -> None:
    interpreted = {} if device == "cuda" else {"rows": 3, "heads": 2, "inner": 1}
    *tensors, row_of, mask = example(device=device, **interpreted)
    kernel, definition = calls(row_of, mask, backend=backend, causal=True)
    assert_as_exact(kernel, definition, tensors, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_all_of_themselves(backend: str) -> None:
    *tensors, row_of, mask = example(rows=3, prefixes=1, length=7, prefix=17, size=16, masked=False)
    kernel, definition = calls(row_of, mask, backend=backend, causal=False)
    assert_as_exact(kernel, definition, tensors, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_attention_to_a_shared_text(backend: str) -> None:
    query, _, _, key, value, row_of, mask = example(rows=4, length=18, prefix=9, heads=2)
    kernel, definition = calls(row_of, mask, backend=backend, causal=True)
    assert_as_exact(kernel, definition, [query, None, None, key, value], torch.float32)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_flex(causal: bool, device: str) -> None:
    *tensors, row_of, mask = example(rows=3, length=7, prefix=11, size=16, device=device)
    kernel, definition = calls(row_of, mask, backend="flex", causal=causal)
    if device == "cuda":
        return assert_as_exact(kernel, definition, tensors, torch.float32)
    torch.testing.assert_close(kernel(*tensors), definition(*tensors), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="no backward on the CPU"):
        kernel(tensors[0].requires_grad_(), *tensors[1:])


def test_definition_is_attention_of_each_row_alone() -> None:
    query, key, value, prefix_key, prefix_value, row_of, mask = example()
    found = prefix_attention(
        query, key, value, prefix_key, prefix_value, row_of=row_of, prefix_mask=mask, backend="torch"
    )
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
            torch.testing.assert_close(found[r, :, t : t + 1], alone, atol=1e-5, rtol=1e-5)


@needs_triton
def test_gradients_of_a_prefix_have_the_same_bits_in_every_run() -> None:
    *tensors, row_of, mask = example(rows=3, length=16, prefix=16, heads=2, inner=1, size=16)
    runs = []
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = prefix_attention(*leaves, row_of=row_of, prefix_mask=mask, backend="triton")
        runs.append(torch.autograd.grad(out.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@settings(max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_slots_hold_every_row_once(numbers: list[int]) -> None:
    row_of = torch.tensor(numbers)
    found = slots(row_of, 5)
    assert torch.equal(found.row.flatten()[found.place], torch.arange(len(numbers)))
    assert torch.equal(found.place // found.row.shape[1], row_of)


def test_shapes_that_do_not_fit() -> None:
    query, key, value, prefix_key, prefix_value, row_of, _ = example()
    with pytest.raises(ValueError, match="heads a multiple"):
        prefix_attention(query[:, :3], key, value, prefix_key, prefix_value, row_of=row_of)
    with pytest.raises(ValueError, match="key must be"):
        prefix_attention(query, key, None, prefix_key, prefix_value, row_of=row_of)
    with pytest.raises(ValueError, match="must be auto, torch, sdpa, flex or triton"):
        prefix_attention(query, key, value, prefix_key, prefix_value, row_of=row_of, backend="flash")


def test_what_computes_is_said_once_and_a_named_one_is_held_to(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    *tensors, row_of, mask = example(rows=2, length=3, prefix=4, size=8)
    monkeypatch.setattr(prefix, "triton_problem", lambda device: "triton is not installed")
    prefix._triton_problem.cache_clear()
    for _ in range(3):
        prefix_attention(*tensors, row_of=row_of, prefix_mask=mask)
    assert caplog.messages == ["kernel prefix_attention: sdpa (no Triton: triton is not installed)"]
    assert caplog.records[0].levelname == "WARNING"  # shown without any set-up of logging
    with pytest.raises(ValueError, match="triton was asked for, but triton is not installed; use auto or sdpa"):
        prefix_attention(*tensors, row_of=row_of, backend="triton")
    prefix._triton_problem.cache_clear()
    monkeypatch.setattr(prefix, "triton_problem", lambda device: None)
    with pytest.raises(ValueError, match="computes in float32, and the tensors are float64"):
        prefix_attention(*(t.double() for t in tensors), row_of=row_of, backend="triton")
    prefix._triton_problem.cache_clear()
