"""Simulators on a Ray cluster of two nodes: as local workers, and a node that goes takes only its episodes along."""

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl.vla.rollout.collect import RolloutPlan, collect
from genrl.vla.rollout.sampling import FlowSteps
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment
from tests import ray_nodes
from tests.vla import frail
from tests.vla.frail import FINE, HANG, KILL, RAISE
from tests.vla.simulators.test_vla_workers import actions, same, walk
from tests.vla.tiny_policies import FACTS, flow

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: pip install 'genrl-diffusion[ray]'", allow_module_level=True)
pytestmark = pytest.mark.slow
FRAIL = f"{Path(frail.__file__)}:make"
HOW: dict[str, Any] = {"num_envs": 4, "chunk": 2, "ray_actors": 2, "workers": "ray"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes.connected(cpus=2) as nodes:
        yield nodes


def nodes_of(env: Any) -> set[str]:
    from ray._private.state import actors

    return {actors(worker.actor._actor_id.hex())["Address"]["NodeID"] for worker in env.crew.workers}


def test_rollouts_are_those_of_local_workers(cluster: Any) -> None:
    failing = {2: (FINE, RAISE, FINE, FINE)}
    env, local = open_environment(Simulation(FRAIL, **HOW)), open_environment(Simulation(FRAIL, num_envs=4, chunk=2))
    assert same(walk(env, 8, failing=failing), walk(local, 8, failing=failing)) and env.dropped == 1
    assert np.array_equal(env.render([3, 0]), local.render([3, 0]))
    env.close()
    policy, rollouts = flow(FACTS, critic=1), []
    for how in ({"workers": "ray"}, {"workers": 0}):
        table = open_environment(Simulation("minitable", num_envs=6, chunk=4, group_size=2, max_steps=12, **how))
        rollouts.append(collect(table, policy, FlowSteps(), RolloutPlan(decisions=6, seed=3, iteration=2)))
        if how["workers"] == "ray":
            assert len(table.crew.workers) == 4, "one per CPU of the cluster"
        table.close()
    for name, value in rollouts[0]._asdict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(rollouts[1], name)), name


@pytest.mark.parametrize("failure", [KILL, HANG])
def test_an_actor_that_dies_or_hangs_is_replaced(cluster: Any, failure: float) -> None:
    env = open_environment(Simulation(FRAIL, timeout_s=2.0, **HOW))
    env.reset(seed=3)
    begun = time.monotonic()
    info = env.step(actions(FINE, failure, FINE, FINE))[4]
    assert info["dropped"].tolist() == [True, True, False, False] and (env.dropped, env.restarts) == (2, 1)
    info = env.step(actions(*[FINE] * 4))[4]
    assert info["n_executed"].tolist() == [0, 0, 2, 2] and time.monotonic() - begun < 60
    env.close()


def test_misuse_is_told(cluster: Any) -> None:
    with pytest.raises(ValueError, match="99 actors of one CPU each, the Ray cluster has 4"):
        open_environment(Simulation(FRAIL, num_envs=99, chunk=2, workers="ray", ray_actors=99))


def test_a_node_that_goes(cluster: Any) -> None:
    """Its actors are started again on what is left; twice where the first successor is put on the node that goes."""
    env = open_environment(Simulation(FRAIL, **HOW))
    env.reset(seed=3)
    assert len(nodes_of(env)) == 2, "spread over both nodes"
    lost = cluster.worker_nodes.copy().pop()
    cluster.remove_node(lost, allow_graceful=False)
    begun = time.monotonic()
    while not env.restarts and time.monotonic() - begun < 60:  # the actor goes a little after its node
        info = env.step(actions(*[FINE] * 4))[4]
        time.sleep(0.1)
    assert env.restarts in (1, 2) and env.dropped == info["dropped"].sum() <= 2
    env.step(actions(*[FINE] * 4))
    assert (env.step(actions(*[FINE] * 4))[4]["n_executed"] > 0).any() and len(nodes_of(env)) == 1
    env.close()
