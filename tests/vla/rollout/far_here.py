"""Acting actors without Ray: the host runs in a thread of this process, and what would cross the network is pickled."""

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from genrl.vla.rollout import ray_rollout
from genrl.vla.simulators import ray_workers
from genrl.vla.simulators.workers import Worker, WorkerLost, messages


class Near(Worker):
    def start(self) -> None:
        self.host: Any = None

    def do(self, work: Any) -> Iterator[Any]:
        if self.host is None:
            self.host = self.description.host(len(self.slots))
        for message in messages(self.host, pickle.loads(pickle.dumps(work))):  # noqa: S301
            if self.host is None:
                raise WorkerLost("it was killed")
            yield pickle.loads(pickle.dumps(message))  # noqa: S301

    def kill(self) -> None:
        self.host = None

    def close(self) -> None:
        self.host = None


def install(monkeypatch: pytest.MonkeyPatch, actors: int = 1) -> None:
    """Runs with `environment.workers: ray` act, and are evaluated, by so many of these."""
    ray: Any = SimpleNamespace(get_gpu_ids=list, get=pickle.loads, put=pickle.dumps)
    monkeypatch.setattr(ray_rollout, "connected", lambda: ray)
    monkeypatch.setattr(ray_rollout, "room", lambda wanted: actors)
    monkeypatch.setattr(ray_rollout, "Actor", Near)
    monkeypatch.setattr(ray_workers, "actors", lambda wanted: actors)
    monkeypatch.setattr(ray_workers, "Actor", Near)
