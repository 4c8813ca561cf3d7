"""Ray clusters on this machine, for the tests and the drills."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def started(nodes: int, cpus: int) -> Iterator[Any]:
    """A cluster (`ray.cluster_utils.Cluster`) of so many nodes, each of so many CPUs."""
    patient = {"RAY_agent_register_timeout_ms": "300000", "RAY_raylet_start_wait_time_s": "300"}  # on a busy machine
    # Ray's workers have niceness 15: beside the other half of the tests they would get hardly any time
    os.environ.update(patient | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=cpus)
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def connected(cpus: int) -> Iterator[Any]:
    """A cluster of two nodes, to which this process is connected."""
    with started(2, cpus) as cluster:
        import ray

        ray.shutdown()  # an earlier test's environment may have started a cluster that ends with this process
        ray.init(address=cluster.address, log_to_driver=False, include_dashboard=False)
        try:
            yield cluster
        finally:
            ray.shutdown()


def process_of(actor: Any) -> int:
    """The process in which an actor is."""
    from ray._private.state import actors

    return int(actors(actor._actor_id.hex())["Pid"])
