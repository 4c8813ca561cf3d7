"""Dynamic-TreeRPO's supervised part: bounds and weights at their ends, and gradients."""

import math

import pytest
import torch

from genrl.diffusion.methods.dynamic_tree_rpo import train
from genrl.mdp import kernels
from genrl.objectives.policy_losses import clipped_surrogate


def test_the_surrogate_clips_each_sample_at_its_own_bounds() -> None:
    advantage = torch.tensor([2.0, 0.1, -2.0, -0.1]).double()
    lower, upper = train.dynamic_clip_bounds(advantage, low=0.1, high=0.2, sensitivity=0.5)
    new = torch.tensor([1.25, 1.25, 0.87, 0.87]).double().log().requires_grad_()
    out = clipped_surrogate(new, torch.zeros(4).double(), advantage, lower, upper)
    assert out.clipped.tolist() == [False, True, False, True]
    (gradient,) = torch.autograd.grad(out.loss.sum(), new)
    assert torch.equal(gradient == 0, out.clipped)
    one_by_one = [
        clipped_surrogate(new[k], torch.zeros(()).double(), advantage[k], float(lower[k]), float(upper[k])).loss
        for k in range(4)
    ]
    assert torch.equal(out.loss, torch.stack(one_by_one))
    with pytest.raises(ValueError, match="cannot be negative"):
        clipped_surrogate(new, new, advantage, -lower, upper)


def test_weights_are_0_for_the_best_and_1_for_the_worst() -> None:
    rewards = torch.tensor([[1.0, 3.0, 2.0, math.nan], [5.0, 5.0, 5.0, 5.0], [math.nan] * 4])
    weights = train.progress_weights(rewards)
    assert torch.allclose(weights[0], torch.tensor([1.0, 0.0, 0.5, 0.0]).double(), atol=1e-8)
    assert (weights[1:] == 0).all()


def test_the_best_leaf_and_the_target_have_no_gradient() -> None:
    velocity = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.zeros(3, 2, 4, requires_grad=True)
    weights = torch.tensor([0.0, 0.5, 1.0])
    loss = train.progress_loss(weights, velocity, target)
    assert loss.shape == (3,) and loss[0] == 0
    loss.sum().backward()
    assert target.grad is None
    assert torch.allclose(velocity.grad, weights[:, None, None] * 2 * velocity.detach() / 8)


def test_the_sound_target_leads_to_the_picture() -> None:
    x, clean = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).unbind()
    sigma = torch.tensor([1.0, 0.6, 0.2])
    velocity = train.velocity_towards(x, clean, sigma)
    assert torch.allclose(kernels.ode(x, velocity, sigma, 0.0).mean, clean, atol=1e-6)
    with pytest.raises(ValueError, match="sigma 0"):
        train.velocity_towards(x, clean, 0.0)


@pytest.mark.parametrize(("low", "high", "sensitivity"), [(0.0, 1e-4, 0.5), (1e-4, -1.0, 0.5), (1e-4, 1e-4, -0.1)])
def test_bounds_that_are_none_are_refused(low: float, high: float, sensitivity: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        train.dynamic_clip_bounds(torch.zeros(2), low=low, high=high, sensitivity=sensitivity)
