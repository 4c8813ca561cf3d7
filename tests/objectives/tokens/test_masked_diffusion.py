"""BGPO: a bound, exact on policy, and a sum over masks."""

from __future__ import annotations

import torch

from genrl.objectives.tokens.group_losses import linear_bound_loss


def test_masks_can_be_run_one_at_a_time() -> None:
    old, elbo = torch.randn(3, 4), torch.randn(3, 4)
    advantage = torch.tensor([1.0, -1.0, 0.0])
    whole = linear_bound_loss(elbo, old, advantage)
    parts = [linear_bound_loss(elbo[:, j : j + 1], old[:, j : j + 1], advantage) / 4 for j in range(4)]
    assert torch.allclose(torch.stack(parts).sum(0), whole)
