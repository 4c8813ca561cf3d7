"""Heads of a policy that is trained further."""

from __future__ import annotations

import pytest
import torch
from tiny_policies import flow

from genrl.vla.setup import with_heads
from genrl.vla.tiny_flow import NoiseHead


@pytest.mark.parametrize(("had", "wanted"), [("expert", "context"), ("context", "expert"), ("none", "expert")])
def test_a_noise_head_in_another_place_is_new_and_the_rest_stays(had: NoiseHead, wanted: NoiseHead) -> None:
    """From a Flow-Noise run to ReinFlow, and back."""
    policy = flow(critic=True, noise_head=had)
    made, again = (with_heads(policy, critic=True, noise_head=wanted, seed=3) for _ in range(2))
    before, after = policy.state_dict(), made.state_dict()
    for name, value in after.items():
        if name.startswith("noise_head."):
            assert torch.equal(value, again.state_dict()[name])
            assert name not in before or before[name].shape != value.shape or not torch.equal(value, before[name])
        else:
            assert torch.equal(value, before[name]), name
    assert with_heads(made, critic=True, noise_head=wanted, seed=3) is made
