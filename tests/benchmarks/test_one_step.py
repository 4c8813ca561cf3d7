"""The ring's score is that of its density, and the table's figures are of what they say."""

from __future__ import annotations

import torch

from benchmarks import one_step


def test_the_teachers_score_is_the_gradient_of_the_rings_density() -> None:
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    sigma = torch.tensor([[0.05], [0.2], [0.4], [0.6], [0.8], [0.95]]).double()
    variance = (1 - sigma) ** 2 * one_step.VARIANCE + sigma**2
    away = x[:, None] - (1 - sigma)[:, None] * one_step.CENTRES
    density = torch.logsumexp(one_step.CAPTION - away.square().sum(-1) / (2 * variance), 1)
    expected = torch.autograd.grad(density.sum(), x)[0]
    torch.testing.assert_close(one_step.teacher(x, sigma, one_step.CAPTION), expected, rtol=1e-5, atol=1e-6)
