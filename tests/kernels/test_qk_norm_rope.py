"""The kernel against its definition, the definition against torch's own RMS norm and complex rotation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrl.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_torch
from tests.kernels.kernel_errors import DEVICES, DTYPES, assert_as_exact, needs_triton


def example(batch: int, tokens: int, heads: int, size: int, *, across: bool, device: str = "cpu"):
    torch.manual_seed(batch * tokens + size)
    x = torch.randn(batch, tokens, heads, size)
    weight = 1.0 + 0.3 * torch.randn(heads * size if across else size)
    angle = torch.randn(tokens, size // 2)
    return [t.to(device) for t in (x, weight, angle.cos(), angle.sin())]


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("across", [False, True])
def test_kernel_is_as_near_to_float64_as_torch(dtype: torch.dtype, across: bool, device: str) -> None:
    x, weight, cos, sin = example(2, 5, 3, 24, across=across, device=device)

    def kernel(x, weight):
        return qk_norm_rope(x, weight, cos, sin, eps=1e-6, backend="triton")

    def definition(x, weight):
        return qk_norm_rope_torch(x, weight, cos, sin, 1e-6)

    assert_as_exact(kernel, definition, [x, weight], dtype)


@needs_triton
@pytest.mark.parametrize("weighted", [False, True])
def test_kernel_without_rotation_or_weight(weighted: bool) -> None:
    x, weight, _, _ = example(1, 7, 2, 64, across=False)
    given = [x, weight if weighted else None]

    def kernel(x, weight):
        return qk_norm_rope(x, weight, eps=1e-5, backend="triton")

    assert_as_exact(kernel, lambda x, w: qk_norm_rope_torch(x, w, None, None, 1e-5), given, torch.float32)


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.sampled_from([2, 6, 16]), st.booleans())
def test_definition_is_rms_norm_then_complex_rotation(
    batch: int, tokens: int, heads: int, size: int, across: bool
) -> None:
    x, weight, cos, sin = example(batch, tokens, heads, size, across=across)
    found = qk_norm_rope(x, weight, cos, sin, eps=1e-6)
    normed = torch.nn.functional.rms_norm(x.flatten(2) if across else x, weight.shape, weight, 1e-6).view(x.shape)
    turned = torch.view_as_complex(normed.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)[:, None]
    torch.testing.assert_close(found, torch.view_as_real(turned).flatten(-2), atol=2e-6, rtol=1e-5)


def test_shapes_that_do_not_fit() -> None:
    x, weight, cos, sin = example(1, 5, 3, 16, across=False)
    with pytest.raises(ValueError, match=r"weight must be \[16\] or \[48\]"):
        qk_norm_rope(x, torch.ones(3))
    with pytest.raises(ValueError, match=r"sin must be \[5, 8\]"):
        qk_norm_rope(x, weight, cos, sin[:4])
    with pytest.raises(ValueError, match="even D"):
        qk_norm_rope(x[..., :15], None)
