"""Attention by a library that is named: it runs, or is an error."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from genrl.kernels import joint_attention, machine
from genrl.kernels.fused import fused, modulated, qk_norm_rope
from genrl.runtime.weights.devices import without_cudnn_attention


def test_joint_attention_is_softmax_attention_under_its_mask() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 7, 3, 8)
    mask = (torch.arange(7)[None] < torch.tensor([[7], [4]]))[:, None, None]
    exact = softmax_attention(q, k, v, torch.where(mask, 0.0, -torch.inf))
    for name in machine.usable(q, mask):
        found = joint_attention.joint_attention(q, k, v, mask=mask, backend=name)
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("flash2", "not installed"), ("cudnn", "needs a GPU and the tensors are on cpu"), ("sage", "not installed")],
)
def test_a_named_attention_that_cannot_run_is_an_error(name: str, reason: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("what is missing here may be there")
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=rf"attention back-end {name}: .*{reason}.*; that can run here: auto, math"):
        joint_attention.joint_attention(q, q, q, backend=name)  # type: ignore[arg-type]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5 + bias
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)


def test_packages_are_called_by_their_own_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the signatures of the packages, which need a GPU: [B, S, H, D] for all, a bias for xformers."""

    def efficient(q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None = None) -> Tensor:
        assert attn_bias is None or attn_bias.stride(-2) % 8 == 0
        return softmax_attention(q, k, v, 0.0 if attn_bias is None else attn_bias)

    def sage(q: Tensor, k: Tensor, v: Tensor, *, tensor_layout: str) -> Tensor:
        assert tensor_layout == "NHD"
        return softmax_attention(q, k, v)

    flash = {
        "flash_attn": softmax_attention,
        "flash_attn_interface": lambda q, k, v: (softmax_attention(q, k, v), None),
    }
    for package, function in flash.items():
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(flash_attn_func=function))
    monkeypatch.setitem(sys.modules, "xformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "xformers.ops", SimpleNamespace(memory_efficient_attention=efficient))
    monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=sage))
    joint_attention._library.cache_clear()
    q, k, v = torch.randn(3, 2, 7, 3, 8)
    for name in machine.PACKAGES:
        assert torch.equal(joint_attention._library(name)(q, k, v, None), softmax_attention(q, k, v)), name
    mask = (torch.arange(7)[None] < torch.tensor([[7], [4]]))[:, None, None]
    found = joint_attention._library("xformers")(q, k, v, mask)
    exact = joint_attention.joint_attention(q, k, v, mask=mask)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)
    joint_attention._library.cache_clear()


def xformers_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three texts padded to 13 of 29 tokens, two heads: queries, keys, values, mask."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 29, 2, 16)
    mask = torch.ones(3, 29, dtype=torch.bool)
    mask[1, 5:13], mask[2, 1:13] = False, False
    return q, k, v, mask[:, None, None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("masked", [False, True])
def test_xformers_itself_computes_the_same(masked: bool) -> None:
    pytest.importorskip("xformers", reason="the extra is not installed: pip install 'genrl-diffusion[xformers]'")
    *rows, mask = (t.cuda() for t in xformers_inputs())
    found = {}
    for name in ("xformers", "math"):
        leaves = [row.to(torch.bfloat16).requires_grad_() for row in rows]
        out = joint_attention.joint_attention(*leaves, mask=mask if masked else None, backend=name)  # type: ignore[arg-type]
        found[name] = (out, *torch.autograd.grad(out.float().square().sum(), leaves))
    for ours, exact in zip(found["xformers"], found["math"], strict=True):
        torch.testing.assert_close(ours, exact, atol=2e-2, rtol=2e-2)


def test_a_gradient_comes_back_contiguous() -> None:
    """Of a slice of a wider tensor, as FLUX.1's single blocks have it."""
    seen: list[Tensor] = []
    x = torch.randn(2, 3, 4, requires_grad=True)
    doubled = 2 * x
    doubled.register_hook(seen.append)
    torch.cat([joint_attention._Contiguous.apply(doubled), x], 2)[..., :4].sum().backward()  # type: ignore[no-untyped-call]
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
        found = {}
        for backend_name in (name, "math"):
            leaves = [row.clone().requires_grad_() for row in rows]
            out = joint_attention.joint_attention(*leaves, backend=backend_name).flatten(2)  # type: ignore[arg-type]
            joined = torch.cat([out, wide[..., out.shape[2] :]], 2) if of_wider else out
            found[backend_name] = torch.autograd.grad(joined, leaves, wide[..., : joined.shape[2]].contiguous())
        for ours, exact in zip(found[name], found["math"], strict=True):
            torch.testing.assert_close(ours, exact, atol=2e-2, rtol=2e-2)


def test_flash_takes_no_mask() -> None:
    problem = machine.attention_problem("flash", torch.device("cpu"), torch.float32, masked=True)
    assert problem == "it takes no mask, and this model pads its texts"
    with pytest.raises(ValueError, match="must be one of auto, math, .* not 'fa2'"):
        machine.attention_problem("fa2", torch.device("cpu"), torch.float32, False)  # type: ignore[arg-type]


def test_what_is_chosen_breaks_no_compiled_graph() -> None:
    def block(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q = fused(qk_norm_rope, x, weight, None, None, 1e-6)
        h = joint_attention.joint_attention(q, q, x).flatten(2)
        y: torch.Tensor = fused(modulated, h, scale, scale, 1e-6)
        return y

    inputs = torch.randn(2, 5, 2, 8), torch.ones(8), torch.randn(2, 1, 16)
    whole = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(whole(*inputs), block_by_hand(*inputs))


def block_by_hand(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    q = qk_norm_rope(x, weight, None, None, 1e-6)
    return modulated(joint_attention.joint_attention(q, q, x).flatten(2), scale, scale, 1e-6)
