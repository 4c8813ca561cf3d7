"""Heads of a policy that is trained further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import vla_runs
from tiny_policies import diffusion, flow

from genrl.vla.setup import sampler_of, with_heads
from genrl.vla.tiny_flow import NoiseHead
from genrl.vla.train import check_processes


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


@pytest.mark.parametrize(
    ("policy", "sampler"), [(flow(), "diffusion"), (diffusion(), "flow_sde"), (diffusion(), "flow_cps")]
)
def test_a_sampler_that_the_policy_cannot_do_is_refused_before_anything_is_written(
    policy: Any, sampler: str, tmp_path: Path
) -> None:
    config = vla_runs.config(tmp_path, sampler=sampler)
    with pytest.raises(ValueError, match=f"sampler.kind: {sampler} needs a policy that predicts"):
        sampler_of(config, policy)


def test_fewer_frames_than_processes_are_refused(tmp_path: Path) -> None:
    """One of them would have a mean over nothing."""
    config = vla_runs.config(tmp_path, **vla_runs.SFT)
    with pytest.raises(ValueError, match="trainer.batch_size: 16 frames .* 17 processes"):
        check_processes(config, 17)
