"""Simulators on Ray actors, on this machine or on many: `workers.Worker` in another place.

There is at most one actor per CPU of the cluster, placed on the node with the most room. genrl and the simulator must
be installed on all nodes. Messages stream back one by one, so timeouts mean what they mean for processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from genrl.runtime.loop.ray_cluster import connected
from genrl.vla.simulators.contract import Description, Host, Message
from genrl.vla.simulators.workers import Work, Worker, WorkerLost, messages, report


def actors(wanted: int) -> int:
    """How many actors there can be: `wanted`, or with 0 one per CPU of the cluster, shared by the processes of a run.

    Raises ValueError for more than there are CPUs: they would wait for ever.
    """
    cpus = int(connected().cluster_resources().get("CPU", 0)) // int(os.environ.get("WORLD_SIZE", "1"))
    if wanted > cpus:
        raise ValueError(f"ray_actors: {wanted} actors of one CPU each, the Ray cluster has {cpus}")
    return wanted or max(1, cpus)


class Remote:
    """What an actor is."""

    def __init__(self, description: Description, slots: int) -> None:
        self.description, self.slots = description, slots
        self.host: Host | None = None

    def run(self, work: Work) -> Iterator[Message]:
        """The messages of a piece of work."""
        try:
            if self.host is None:
                self.host = self.description.host(self.slots)
            yield from messages(self.host, work)
        except Exception as error:
            # First as text: the exception itself may be of a class that cannot be pickled.
            yield report(error)
            raise

    def close(self) -> None:
        """Close the environments."""
        if self.host is not None:
            self.host.close()


class Actor(Worker):
    """The host in a Ray actor."""

    gpus = 0.0
    """Its share of one."""

    def start(self) -> None:
        """Ask for an actor, half of a CPU, since there are as many for rollouts as for evaluations, which take turns
        but for runs with staleness; it begins where and when there is room. Ray does not restart it: its episodes are
        gone with it."""
        place = {"num_cpus": 0.5, "num_gpus": self.gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self.actor = connected().remote(Remote).options(**place).remote(self.description, len(self.slots))

    def do(self, work: Work) -> Iterator[Message]:
        """See `workers.Worker`."""
        ray = connected()
        try:
            for message in self.actor.run.options(num_returns="streaming").remote(work):
                yield ray.get(message)
        except ray.exceptions.RayError as error:
            raise WorkerLost(f"its Ray actor failed: {error}") from error

    def kill(self) -> None:
        """At once."""
        connected().kill(self.actor)

    def close(self) -> None:
        """Ask, and wait for five seconds."""
        ray = connected()
        try:
            ray.get(self.actor.close.remote(), timeout=5.0)
        except ray.exceptions.RayError:
            pass  # it hangs or has ended: killed either way
        self.kill()
