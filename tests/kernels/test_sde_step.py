"""Sampling and replay have the same bits; the definition is that of `genrl.mdp`, to the bit."""

from __future__ import annotations

import pytest
import torch

from genrl.kernels.sde_step import sde_step, sde_step_torch
from genrl.mdp import gaussian, kernels
from tests.kernels.kernel_errors import DEVICES, needs_triton, values_and_gradients

BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]


def example(dtype: torch.dtype = torch.float32, device: str = "cpu"):
    torch.manual_seed(0)
    x, noise = torch.randn(2, 3, 4, 30, 11, device=device)
    velocity = torch.randn(3, 4, 30, 11, device=device).to(dtype)
    a, b, s = torch.rand(3, 3).double() + 0.2
    return x, velocity, a, -b, s, noise


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_replay_has_the_bits_of_the_sampling(backend: str, reduction: str, dtype: torch.dtype, device: str) -> None:
    x, velocity, a, b, s, noise = example(dtype, device)
    drawn = sde_step(x, velocity, a, b, s, noise=noise, reduction=reduction, backend=backend)
    again = sde_step(x, velocity.requires_grad_(), a, b, s, taken=drawn.next, reduction=reduction, backend=backend)
    assert torch.equal(drawn.log_prob, again.log_prob.detach()) and torch.equal(drawn.mean, again.mean.detach())
    assert torch.equal(drawn.next, again.next)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_is_the_definition(dtype: torch.dtype) -> None:
    x, velocity, a, b, s, noise = example(dtype)
    taken = sde_step_torch(x, velocity, a, b, s, noise, None, "mean").next

    def call(backend):
        return lambda v: sde_step(x, v, a, b, s, taken=taken + 0.1, backend=backend)[1:]

    found, exact = (values_and_gradients(call(one), [velocity]) for one in ("triton", "torch"))
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5 if dtype == torch.float32 else 1e-2)


def test_definition_is_that_of_the_mdp_to_the_bit() -> None:
    x, velocity, _, _, _, noise = example(torch.bfloat16)
    transition = kernels.flow_sde(x, velocity, 0.7, 0.6, noise_level=0.7, sigma_max=0.9)
    one, zero = torch.ones(3, 1).double(), torch.zeros(3, 1).double()
    a = kernels.flow_sde(one, zero, 0.7, 0.6, noise_level=0.7, sigma_max=0.9).mean[:, 0]
    b, s = kernels.flow_sde(zero, one, 0.7, 0.6, noise_level=0.7, sigma_max=0.9)
    found = sde_step(x, velocity, a, b[:, 0], s[:, 0], noise=noise)
    drawn = gaussian.sample(transition.mean, transition.std, noise)
    assert torch.equal(found.mean, transition.mean) and torch.equal(found.next, drawn)
    assert torch.equal(found.log_prob, gaussian.log_prob(drawn, transition.mean, transition.std))


def test_errors() -> None:
    x, velocity, a, b, s, noise = example()
    with pytest.raises(ValueError, match="either noise"):
        sde_step(x, velocity, a, b, s)
    with pytest.raises(ValueError, match="std 0 is no action"):
        sde_step(x, velocity, a, b, s * 0, noise=noise)
