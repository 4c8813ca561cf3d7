"""Acting on Ray actors, policy and simulators together, on a cluster of two nodes: through the configuration too."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from genrl.vla.rollout import ray_rollout
from genrl.vla.rollout.collect import ChunkRollout, RolloutPlan, collect, episode_returns, joined
from genrl.vla.rollout.ray_rollout import RayRollouts
from genrl.vla.rollout.sampling import FlowSteps
from genrl.vla.run import check_on_policy
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment
from genrl.vla.train import train
from tests import ray_nodes
from tests.vla import vla_runs
from tests.vla.test_resume import straight_and_stopped
from tests.vla.tiny_policies import FACTS, flow

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: pip install 'genrl-diffusion[ray]'", allow_module_level=True)
WHERE: dict[str, Any] = {"name": "minitable", "num_envs": 8, "chunk": 4, "group_size": 2, "max_steps": 8}
HOW: dict[str, Any] = {"decisions": 7, "seed": 3, "iteration": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes.connected(cpus=1) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def far(cluster: Any) -> Iterator[RayRollouts]:
    """One pair of actors for all: to start one is most of what a test costs."""
    rollouts = RayRollouts(Simulation(**WHERE), start_timeout_s=60.0)
    yield rollouts
    rollouts.close()


def test_an_actor_rounds_as_where_the_policy_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    there = SimpleNamespace(get=lambda policies: (flow(), None), get_gpu_ids=list)
    monkeypatch.setattr(ray_rollout, "connected", lambda: there)
    asked: list[bool | None] = []
    monkeypatch.setattr(ray_rollout, "use_tf32", asked.append)
    for wanted in (True, None):
        ray_rollout.ActingHost(1, policies=None, simulation=Simulation(**WHERE), tf32=wanted)
    assert asked == [True, None]


def assert_same(actual: ChunkRollout, wanted: ChunkRollout, tolerance: float = 0.0) -> None:
    for name, value in wanted._asdict().items():
        if isinstance(value, Tensor):
            bound = tolerance if value.is_floating_point() else 0.0
            torch.testing.assert_close(getattr(actual, name), value, rtol=bound, atol=bound, msg=name)
    assert actual.observations.keys() == wanted.observations.keys() and actual.env_seed == wanted.env_seed
    assert actual.instruction == wanted.instruction and np.array_equal(actual.first_episodes, wanted.first_episodes)


def local(policy: Any, slots: range = range(8), **how: Any) -> ChunkRollout:
    env = open_environment(Simulation(**WHERE | {"num_envs": len(slots)}))
    return collect(env, policy, FlowSteps(), RolloutPlan(first_slot=slots.start, **HOW | how))


# The two runs stand before the first test that asks for `far`, which stays and leaves too few CPUs for their actors.
@pytest.mark.slow
def test_a_run_that_acts_on_actors_learns_as_one_that_acts_here(cluster: Any, tmp_path: Path) -> None:
    """With the frozen half of DPPO. Log-probabilities of the actors are the trainer's to the bit, and the run differs
    by rounding alone."""
    runs = []
    for workers in ("ray", 0):
        changes = {"iterations": 2, "evaluation": {"every": 2}, "environment": {"workers": workers, "timeout_s": 300}}
        settings = vla_runs.config(tmp_path, sampler="diffusion", output=str(tmp_path / str(workers)), **changes)
        runs.append(train(settings))
    there, here = (vla_runs.rows(run)[1:] for run in runs)
    assert [row["rollout/log_prob_off"] for row in there] == [0.0, 0.0]
    assert there[-1]["eval/success_mean"] == here[-1]["eval/success_mean"]
    assert [row["rollout/env_steps"] for row in there] == [row["rollout/env_steps"] for row in here]
    weights, wanted = (vla_runs.trained_weights(run) for run in runs)
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.slow
def test_a_run_goes_on_as_if_nothing_had_been(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"iterations": 3, "environment": {"workers": "ray", "staleness": 1, "timeout_s": 300}}
    runs = straight_and_stopped(tmp_path, monkeypatch, [("training", 0)], **changes)
    assert vla_runs.differences(*runs) == []


@pytest.mark.slow
def test_as_collected_here_also_after_an_update(far: RayRollouts) -> None:
    """The same episodes, also later ones, the same noise: to the bit part by part, the whole up to rounding."""
    policy = flow(FACTS, critic=1)
    for version in (1, 2):
        result = far.collect(policy, FlowSteps(), RolloutPlan(**HOW))
        assert (far.version, far.dropped) == (version, 0) and result.episode.max() > 1
        assert_same(result, local(policy), tolerance=1e-3)
        assert_same(result, joined([local(policy, range(4)), local(policy, range(4, 8))]))
        assert [slots.tolist() for slots in far.parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert [check_on_policy(policy, result, slots) for slots in far.parts] == [0.0, 0.0]
        before = check_on_policy(policy, result, torch.arange(4))
        with torch.no_grad():
            policy.out.weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="before the first update"):  # as actors with old weights would be
            check_on_policy(policy, result, torch.arange(4))
        assert before == 0.0 and far.waited_s > 0


@pytest.mark.slow
def test_an_actor_that_dies(far: RayRollouts) -> None:
    policy = flow(FACTS, critic=1)
    far.collect(policy, FlowSteps(), RolloutPlan(**HOW))
    os.kill(ray_nodes.process_of(far.crew.workers[0].actor), signal.SIGKILL)
    result = far.collect(policy, FlowSteps(), RolloutPlan(**HOW))
    assert_same(result, local(policy, range(4, 8)))
    assert (far.dropped, far.restarts) == (4, 1) and [slots.tolist() for slots in far.parts] == [[0, 1, 2, 3]]
    assert result.group.tolist() == [2, 2, 3, 3] and check_on_policy(policy, result, far.parts[0]) == 0.0
    whole = far.collect(policy, FlowSteps(), RolloutPlan(**HOW))
    assert_same(whole, joined([local(policy, range(4)), local(policy, range(4, 8))]))
    assert (far.dropped, far.restarts) == (4, 1)


@pytest.mark.slow
def test_an_actor_that_is_lost_again_and_again(cluster: Any) -> None:
    """Nothing waits for ever: here there is no time to start in."""
    rollouts = RayRollouts(Simulation(**WHERE), start_timeout_s=0.01)
    with pytest.raises(RuntimeError, match="(?s)lost 3 times in a row.*timeout"):
        rollouts.collect(flow(FACTS, critic=1), FlowSteps(), RolloutPlan(**HOW))
    rollouts.close()


def test_parts_of_different_lengths() -> None:
    where = {"name": "minitable", "num_envs": 4, "chunk": 4, "group_size": 2}
    how = {"decisions": 20, "seed": 5, "iteration": 0, "one_episode": True}
    parts = []
    for begin, steps in ((0, 12), (2, 20)):
        env = open_environment(Simulation(**where | {"num_envs": 2, "max_steps": steps}))
        parts.append(collect(env, flow(FACTS, critic=1), FlowSteps(), RolloutPlan(first_slot=begin, **how)))
    assert len(parts[0].valid) < len(parts[1].valid)
    both = joined(parts)
    count = len(parts[0].valid)
    assert torch.equal(both.valid[:count, :2], parts[0].valid) and not both.valid[count:, :2].any()
    assert torch.equal(both.valid[:, 2:], parts[1].valid) and both.group.tolist() == [0, 0, 1, 1]
    assert len(both.observations["observation.state"]) == len(both.valid) + 1
    assert (both.episode[count:, :2] == 1).all() and torch.equal(episode_returns(both)[2:], episode_returns(parts[1]))
