"""Published policies in a simulator: rollouts on MiniTable, the objective's replay, one update, the run's folder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml

from genrl.config import load
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.policy import IMAGE
from genrl.vla.rollout.collect import RolloutPlan, collect
from genrl.vla.rollout.rollout import training_rows
from genrl.vla.rollout.sampling import Diffusion, FlowSteps, replay
from genrl.vla.simulators.minitable import MiniTable
from genrl.vla.train import train
from tests.vla.published_runs import made


@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla", "groot", "diffusion"])
def test_a_rollout_is_replayed_with_ratio_one_and_an_update_moves_it(kind: str, tmp_path) -> None:
    values = {"pi0": 6, "smolvla": 6}.get(kind, 1)
    policy = made(kind, tmp_path / "a", values)
    env = MiniTable(4, chunk=4, image_size=policy.image_size)
    sampler = Diffusion(100, 3, 3) if kind == "diffusion" else FlowSteps(steps=2)
    rollout = collect(env, policy, sampler, RolloutPlan(decisions=2, seed=0, iteration=0))
    assert rollout.values.shape == (2, 4, values) and rollout.values.std() > 0
    assert all(name in rollout.observations for name in policy.inputs)
    batch = training_rows(rollout, torch.arange(4))
    context = policy.encode(batch.observation)
    again = replay(policy, sampler, context, batch.states, batch.next_states, batch.step_index)
    assert torch.equal(again.log_prob, batch.log_prob)
    width = np.prod(again.log_prob.shape[-2:])
    optimiser = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1e-4)
    (-(again.log_prob.sum() / width) + policy.value(context).square().mean()).backward()
    optimiser.step()
    moved = replay(policy, sampler, policy.encode(batch.observation), batch.states, batch.next_states, batch.step_index)
    assert moved.log_prob.double().sum() > again.log_prob.double().sum() + 1e-3
    save_policy(policy, tmp_path / "b")
    theirs = load_policy(tmp_path / "b")
    assert theirs.inputs == policy.inputs and IMAGE in theirs.inputs
    assert torch.equal(theirs.value(theirs.encode(batch.observation)), policy.value(policy.encode(batch.observation)))


@pytest.mark.parametrize("kind", ["pi05", "smolvla", "groot"])
def test_it_imitates_the_expert_and_is_reinforced_from_that_run(kind: str, tmp_path) -> None:
    save_policy(made(kind, tmp_path / "a"), tmp_path / "base")
    common = {"environment": {"name": "minitable", "tasks": ["touch"], "num_envs": 4, "max_steps": 4, "chunk": 2}}
    common |= {"evaluation": {"every": 0, "episodes": 4, "videos": 0}, "trackers": [], "iterations": 1}
    imitation = {"algorithm": "sft", "steps_per_iteration": 2, "batch_size": 4}
    reinforcement = {"algorithm": "ppo", "epochs": 1, "minibatch": 8, "critic_warmup": 0, "kl_stop": None}

    def trained(name: str, path: str, **sections):
        tree = common | sections | {"policy": {"path": path}, "output": str(tmp_path / name)}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        train(load(tmp_path / f"{name}.yaml"))
        return load_policy(tmp_path / name / "policy")

    first = trained("sft", str(tmp_path / "base"), trainer=imitation, demonstrations={"expert": 4})
    noisy = {"kind": "flow_noise", "steps": 2}
    second = trained("ppo", str(tmp_path / "sft"), trainer=reinforcement, sampler=noisy)
    assert second.critic and "noise_head" in dict(second.named_children())
    base, one, two = (dict(p.named_parameters()) for p in (load_policy(tmp_path / "base"), first, second))
    frozen = {"pi05": "paligemma_with_expert.paligemma.", "groot": "backbone."}.get(kind, "vlm_with_expert.vlm.")
    for name in base.keys() & two.keys():
        if "value_head" not in name:
            still = name.startswith(frozen)
            assert torch.equal(base[name], one[name]) == still and torch.equal(one[name], two[name]) == still, name
