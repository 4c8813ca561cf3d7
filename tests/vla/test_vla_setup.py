"""Heads of a policy that is trained further."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from genrl.vla.evaluate import evaluation_episodes
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.policy import NoiseHead
from genrl.vla.run import VLARun
from genrl.vla.setup import open_tables, sampler_of
from genrl.vla.train import train
from tests.vla import vla_runs
from tests.vla.tiny_policies import diffusion, flow


@pytest.mark.parametrize(("had", "wanted"), [("expert", "context"), ("context", "expert"), ("none", "expert")])
def test_a_noise_head_in_another_place_is_new_and_the_rest_stays(had: NoiseHead, wanted: NoiseHead) -> None:
    """From a Flow-Noise run to ReinFlow, and back."""
    policy = flow(critic=1, noise_head=had)
    made, again = (policy.with_heads(critic=1, noise_head=wanted, seed=3) for _ in range(2))
    before, after = policy.state_dict(), made.state_dict()
    for name, value in after.items():
        if name.startswith("noise_head."):
            assert torch.equal(value, again.state_dict()[name])
            assert name not in before or before[name].shape != value.shape or not torch.equal(value, before[name])
        else:
            assert torch.equal(value, before[name]), name
    assert made.with_heads(critic=1, noise_head=wanted, seed=3) is made


def test_a_critic_of_another_number_of_values_is_new_and_the_rest_stays() -> None:
    """From one value of a chunk to one of every action, and back; without a change the policy is the same one."""
    for policy in (flow(critic=1), diffusion(critic=1)):
        before = policy.state_dict()
        made = policy.with_heads(critic=4, noise_head="none", seed=3)
        for name, value in made.state_dict().items():
            assert name.startswith("value_head.") or torch.equal(value, before[name]), name
        first = "value_head.0.entry.weight"
        assert made.value_head[-1].out_features == 4 and not torch.equal(made.state_dict()[first], before[first])
        assert made.with_heads(critic=4, noise_head="none", seed=5) is made
        assert made.with_heads(critic=1, noise_head="none", seed=3).value_head[-1].out_features == 1


def test_what_does_not_fit_the_policy_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for policy, sampler in ((flow(), "diffusion"), (diffusion(), "flow_sde")):
        config = vla_runs.config(tmp_path, sampler=sampler)
        with pytest.raises(ValueError, match=f"sampler.kind: {sampler} needs a policy that predicts"):
            sampler_of(config, policy)
    one_step_size = vla_runs.config(tmp_path, optimizer={"name": "prodigy", "lr": 1.0})
    with pytest.raises(ValueError, match="policy, critic have rates of their own"):
        train(one_step_size)


def test_a_run_rounds_to_tf32_where_it_is_asked_to_and_a_script_does_not_go_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its evaluations as in its training."""
    seen: list[bool] = []
    products = torch.backends.cuda.matmul
    monkeypatch.setattr(VLARun, "evaluate", lambda self, iteration: seen.append(products.allow_tf32) or {})
    assert not products.allow_tf32
    train(vla_runs.config(tmp_path, **vla_runs.SFT, tf32=True, evaluation={"every": 1}))
    assert seen == [True, True] and not products.allow_tf32


@pytest.mark.parametrize("freeze", ["encoder", "nothing"])
def test_a_run_goes_on_only_from_what_it_began_with(freeze: str, tmp_path: Path) -> None:
    """The encoder that is not trained and the first steps of DPPO are read from the policy's folder once more."""
    source = tmp_path / "source"
    shutil.copytree(vla_runs.policy_of("diffusion"), source)
    policy = {"path": str(source), "freeze": freeze}
    run = train(vla_runs.config(tmp_path, sampler="diffusion", policy=policy))
    longer = vla_runs.config(tmp_path, sampler="diffusion", policy=policy, iterations=2)
    other = load_policy(source)
    other.out.bias.data += 0.1
    save_policy(other, source)
    before = vla_runs.trained_weights(run)
    with pytest.raises(ValueError, match=f"policy.path: {source} is not what the run began with"):
        train(longer, run)
    shutil.rmtree(source)
    shutil.copytree(vla_runs.policy_of("diffusion"), source)
    train(longer, run)
    after = vla_runs.trained_weights(run)
    assert any(not torch.equal(before[name], value) for name, value in after.items())


def test_runs_of_other_seeds_are_judged_on_the_same_starts(tmp_path: Path) -> None:
    """Also where a simulator other than MiniTable makes them from a seed."""
    simulator = Path(__file__).parents[2] / "docs" / "example_simulator.py"
    environment = {"name": f"{simulator}:make", "tasks": ["red"], "max_steps": 20}
    starts = []
    for seed in (0, 1):
        config = vla_runs.config(tmp_path, environment=environment, seed=seed)
        env = open_tables(config, flow(), num_envs=3)
        seen, _ = env.reset(options={"episodes": evaluation_episodes(1234, 3)})
        starts.append(np.concatenate([value.reshape(3, -1) for value in seen.values()], 1))
        env.close()
    assert np.array_equal(*starts) and len(np.unique(starts[0], axis=0)) == 3
