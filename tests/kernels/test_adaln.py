"""The kernel against its definition, forward and backward, with and without a branch; the definition against torch."""

from __future__ import annotations

import pytest
import torch

from genrl.kernels.adaln import adaln, adaln_torch
from tests.kernels.kernel_errors import DEVICES, DTYPES, assert_as_exact, needs_triton


def example(batch: int, tokens: int, width: int, *, per_token: bool, device: str = "cpu"):
    torch.manual_seed(tokens)
    x, branch = torch.randn(2, batch, tokens, width)
    gate, scale, shift = torch.randn(3, batch, tokens if per_token else 1, width)
    return [t.to(device) for t in (x, branch, gate, scale, shift)]


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_token", [False, True])
def test_kernel_is_as_near_to_float64_as_torch(dtype: torch.dtype, per_token: bool, device: str) -> None:
    given = example(2, 35 if not per_token else 6, 40, per_token=per_token, device=device)

    def kernel(*inputs):
        return adaln(*inputs, eps=1e-6, backend="triton")

    assert_as_exact(kernel, lambda *inputs: adaln_torch(*inputs, 1e-6), given, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_without_branch(dtype: torch.dtype) -> None:
    x, _, _, scale, shift = example(2, 4, 24, per_token=False)

    def kernel(x, scale, shift):
        return adaln(x, None, None, scale, shift, backend="triton")[1]

    def definition(x, scale, shift):
        return adaln_torch(x, None, None, scale, shift, 1e-6)[1]

    assert_as_exact(kernel, definition, [x, scale, shift], dtype)


@needs_triton
def test_kernel_reads_the_slices_that_a_projection_is_cut_into() -> None:
    """Modulations come from `chunk`: not contiguous over the samples, and not copied."""
    x, branch, *_ = example(3, 5, 16, per_token=False)
    gate, scale, shift = (t[:, None] for t in torch.randn(3, 6 * 16).chunk(6, 1)[1:4])
    found = adaln(x, branch, gate, scale, shift, backend="triton")
    for one, exact in zip(found, adaln_torch(x, branch, gate, scale, shift, 1e-6), strict=True):
        torch.testing.assert_close(one, exact)


def test_definition_is_what_blocks_write_out() -> None:
    x, branch, gate, scale, shift = example(2, 5, 16, per_token=False)
    h, y = adaln(x, branch, gate, scale, shift)
    assert torch.equal(h, x + gate * branch)
    assert torch.equal(y, torch.nn.LayerNorm(16, 1e-6, elementwise_affine=False)(h) * (1 + scale) + shift)
    same, _ = adaln(x, None, None, scale, shift)
    assert same is x


def test_shapes_that_do_not_fit() -> None:
    x, branch, gate, scale, shift = example(2, 5, 16, per_token=False)
    with pytest.raises(ValueError, match="branch and gate come together"):
        adaln(x, branch, None, scale, shift)
    with pytest.raises(ValueError, match=r"must all be \[2, 1, 16\] or all \[2, 5, 16\]"):
        adaln(x, branch, gate, scale[:, 0], shift)
