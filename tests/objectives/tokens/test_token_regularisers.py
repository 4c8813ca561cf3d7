"""KL estimates, entropy, perception and value terms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.objectives.surrogates.policy_losses import kl_k2, kl_k3
from genrl.objectives.tokens import token_regularisers as tr


@given(st.integers(0, 99))
def test_estimates_have_the_mean_they_estimate(seed: int) -> None:
    """Over all tokens with their probabilities, k1 and k3 are the exact KL; k2 has its gradient."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    rows, reference = logits.log_softmax(-1), torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    probability = rows.exp().detach()
    exact = tr.kl_categorical(rows, reference)
    for estimate in (tr.kl_k1, kl_k3):
        assert torch.allclose((probability * estimate(rows, reference)).sum(), exact)
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (k2,) = torch.autograd.grad((probability * kl_k2(rows, reference)).sum(), logits, retain_graph=True)
    (k1,) = torch.autograd.grad((probability * tr.kl_k1(rows, reference)).sum(), logits)
    assert torch.allclose(k2, wanted) and torch.allclose(k1, torch.zeros(6).double(), atol=1e-12)


@given(st.floats(-8, 8))
def test_the_clamped_estimate_is_k3_within_its_limits(difference: float) -> None:
    log_prob = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(-1.0 + difference, dtype=torch.float64)
    plain, clamped = kl_k3(log_prob, reference), tr.kl_k3_clamped(log_prob, reference)
    assert torch.allclose(clamped, plain.clamp(max=10.0))
    (gradient,) = torch.autograd.grad(clamped, log_prob)
    assert torch.allclose(gradient, torch.autograd.grad(plain, log_prob)[0]) if plain < 10 else gradient == 0


def test_far_away_nothing_overflows() -> None:
    assert tr.kl_k3_clamped(torch.tensor(-1e4), torch.tensor(0.0)) == 10.0
    assert tr.kl_k3_clamped(torch.tensor(0.0), torch.tensor(-1e4)) == 10.0


def test_the_entropy_estimate_and_its_band() -> None:
    log_prob, mask = torch.tensor([[-1.0, -3.0], [-2.0, torch.nan]]), torch.tensor([[1, 1], [1, 0]])
    assert tr.sampled_entropy(log_prob, mask) == 2.0
    entropy = torch.tensor([0.1, 0.5, 2.0], requires_grad=True)
    cost = tr.entropy_band(entropy, 0.2, 1.0)
    cost.sum().backward()
    assert torch.allclose(cost, torch.tensor([0.1, 0.0, 1.0])) and entropy.grad.tolist() == [-1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="low <= high"):
        tr.entropy_band(entropy, 1.0, 0.2)


def test_perception_pulls_away_from_the_degraded_answer_and_ignores_rows_without_twin() -> None:
    log_prob = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    degraded = torch.tensor([[-1.5, -0.5], [torch.nan, torch.nan]])
    mask = torch.tensor([[1, 1], [0, 0]])
    loss = tr.perception_loss(log_prob, degraded, mask, gamma=1.0, eta=0.0)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert loss < 0 and bool(gradient[0, 0] < 0 < gradient[0, 1]) and gradient[1].tolist() == [0.0, 0.0]
    alone = tr.perception_loss(log_prob[:1], degraded[:1], mask[:1], gamma=1.0, eta=0.5)
    assert torch.allclose(
        tr.perception_loss(log_prob[:1], degraded[:1], mask[:1], gamma=1.0, eta=0.5, rows=4), alone / 4
    )


def test_the_value_is_clipped_around_the_old_one() -> None:
    value = torch.tensor([0.05, 0.5, -0.5], requires_grad=True)
    loss = tr.clipped_value_loss(value, torch.zeros(3), torch.full((3,), 1.0))
    loss.sum().backward()
    assert torch.allclose(loss, torch.tensor([0.95**2, 0.9**2, 1.5**2]))
    # past the clip and nearer to the target: no gradient; past it and farther: all of it
    assert torch.allclose(value.grad, torch.tensor([-1.9, 0.0, -3.0]))
