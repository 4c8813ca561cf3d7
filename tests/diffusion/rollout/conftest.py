"""A Ray cluster of two nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU."""
    os.environ.update({"RAY_agent_register_timeout_ms": "300000", "RAY_raylet_start_wait_time_s": "300"})  # when busy
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False, include_dashboard=False)
    yield ray
    ray.shutdown()
    nodes.shutdown()


def process_of(actor: Any) -> int:
    from ray._private.state import actors

    return int(actors(actor._actor_id.hex())["Pid"])
