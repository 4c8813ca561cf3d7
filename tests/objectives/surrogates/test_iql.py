"""Implicit Q-learning: cases worked out by hand, and what the losses promise. Golden arrays: test_feasibility."""

from __future__ import annotations

import math

import pytest
import torch

from genrl.objectives.surrogates import iql


def test_targets() -> None:
    rewards, values = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.5, 0.5, 2.0], requires_grad=True)
    target = iql.q_target(rewards, values, torch.tensor([False, True, False]), torch.tensor([0.9, 0.9, 0.81]))
    assert target.tolist() == pytest.approx([0.45, 1.0, 1.62]) and not target.requires_grad


def test_weights_by_hand() -> None:
    weights = iql.advantage_weights(torch.tensor([1.0, 9.0]), torch.tensor([0.5, 0.0]), temperature=2.0, largest=50.0)
    assert weights.tolist() == pytest.approx([math.e, 50.0])
    with pytest.raises(ValueError, match="negative temperature"):
        iql.advantage_weights(torch.ones(1), torch.ones(1), temperature=-1.0, largest=1.0)
