"""BGPO: a bound, exact on policy, and a sum over masks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.objectives.tokens.masked_diffusion import linear_bound_loss
from tests.reference.tokens import exact_loss


@given(st.integers(0, 99))
def test_it_bounds_the_exact_loss_and_touches_it_on_policy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    elbo = (old + 0.5 * torch.randn(5, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(5, generator=generator, dtype=torch.float64)
    assert bool((linear_bound_loss(elbo, old, advantage) >= exact_loss(elbo, old, advantage) - 1e-12).all())
    on_policy = [loss(elbo, elbo.detach(), advantage) for loss in (linear_bound_loss, exact_loss)]
    gradients = [torch.autograd.grad(value.sum(), elbo)[0] for value in on_policy]
    assert torch.allclose(on_policy[0], on_policy[1]) and torch.allclose(gradients[0], gradients[1])


def test_masks_can_be_run_one_at_a_time() -> None:
    old, elbo = torch.randn(3, 4), torch.randn(3, 4)
    advantage = torch.tensor([1.0, -1.0, 0.0])
    whole = linear_bound_loss(elbo, old, advantage)
    parts = [linear_bound_loss(elbo[:, j : j + 1], old[:, j : j + 1], advantage) / 4 for j in range(4)]
    assert torch.allclose(torch.stack(parts).sum(0), whole)
