"""Saved policies: the same one back, LeRobot's files, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from genrl.mdp.noise import keyed_noise
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.policy import ACTION, rows
from tests.vla.tiny_policies import FEELS, SEES, TOLD, diffusion, flow, frames

POLICIES = {
    "flow": lambda: flow(SEES, critic=1, noise_head="context"),
    "flow from states": lambda: flow(TOLD),
    "flow from points": lambda: flow(FEELS),
    "diffusion": lambda: diffusion(SEES, critic=1, train_steps=100),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_saved_policy_is_the_same_policy(name: str, tmp_path) -> None:
    policy = POLICIES[name]()
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert type(loaded) is type(policy) and loaded.config == policy.config and not loaded.training
    seen, x = rows(frames(points=14), torch.arange(4)), keyed_noise((4, 4, 3), 0)
    ours, theirs = policy.encode(seen), loaded.encode(seen)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    ask, time = "noise" if name == "diffusion" else "velocity", torch.ones(4, dtype=torch.int64)
    assert torch.equal(getattr(policy, ask)(ours, x, time), getattr(loaded, ask)(theirs, x, time))
    assert torch.equal(policy.actions(x), loaded.actions(x))
    assert not list((tmp_path / "policy").glob("*.partial"))


def test_the_files_are_lerobots(tmp_path) -> None:
    policy = flow(SEES)
    save_policy(policy, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["input_features"] == {
        "observation.state": {"type": "STATE", "shape": [3]},
        "observation.image": {"type": "VISUAL", "shape": [3, 32, 32]},
    }
    assert config["output_features"] == {"action": {"type": "ACTION", "shape": [3]}} and config["chunk_size"] == 4
    assert config["normalization_mapping"]["ACTION"] == "MIN_MAX" and config["type"] == "tiny_flow_vla"
    processor = json.loads((tmp_path / "policy_postprocessor.json").read_text())
    stats = load_file(tmp_path / processor["steps"][0]["state_file"])
    assert torch.equal(stats["action.max"], policy.stats[ACTION]["max"])
    assert set(load_file(tmp_path / "model.safetensors")) == set(policy.state_dict())


def test_what_is_not_such_a_folder_is_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load_policy(tmp_path)
    save_policy(flow(SEES), tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())

    def with_config(**changes) -> None:
        (tmp_path / "config.json").write_text(json.dumps(good | changes))

    with_config(type="diffusion_mlq")
    with pytest.raises(ValueError, match="unknown policy 'diffusion_mlq'; did you mean diffusion_mlp"):
        load_policy(tmp_path)
    with_config(normalization_mapping={"ACTION": "MEAN_STD"})
    with pytest.raises(ValueError, match="normalization_mapping"):
        load_policy(tmp_path)
    with_config(chunk_size=8)
    with pytest.raises(ValueError, match="does not fit"):
        load_policy(tmp_path)
    with_config()
    stats = "policy_preprocessor_step_0_normalizer_processor.safetensors"
    save_file(
        {name: value for name, value in load_file(tmp_path / stats).items() if "action" not in name}, tmp_path / stats
    )
    with pytest.raises(ValueError, match="action needs statistics"):
        load_policy(tmp_path)
