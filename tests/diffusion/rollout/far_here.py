"""Rollout workers without Ray: the worker is called in this process, and what would cross the network is pickled."""

import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from genrl.diffusion.config.schema import Config
from genrl.diffusion.rollout import ray_rollouts
from genrl.diffusion.rollout.forest import Draw
from genrl.diffusion.rollout.ray_rollouts import Order, RolloutActor, Work
from genrl.diffusion.rollout.rollout import Finishing, Job, Worker

ENGINE = {"rollout_workers": 1}


class Near:
    def __init__(self, config: Config, count: int, options: object) -> None:
        self.actor, self.version = RolloutActor(), 0
        self.actor.open(config.model_dump_json(), os.getcwd(), 1)

    def ready(self) -> None: ...

    def close(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def order(self, draw: Draw, weights: Mapping[str, Tensor], worker: Worker) -> Order:
        self.version += 1
        return Order(self.version, pickle.dumps((draw, dict(weights))))

    def draw(self, order: Order, jobs: Iterable[Job], worker: Worker, counted: Callable[[int], None]) -> Finishing:
        for job in jobs:
            work = pickle.loads(pickle.dumps(Work(order.version, order.sent, job)))  # noqa: S301
            part = pickle.loads(pickle.dumps(self.actor.draw(work)))  # noqa: S301
            assert part.version == order.version
            counted(part.model_calls)
            yield job.position, part.finished


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with `ENGINE` draw by it."""
    ray: Any = SimpleNamespace(get_gpu_ids=list, get=pickle.loads)
    monkeypatch.setattr(ray_rollouts, "connected", lambda: ray)
    monkeypatch.setattr("genrl.diffusion.train.cluster", lambda accelerator: nullcontext())
    monkeypatch.setattr("genrl.diffusion.train.room_for", lambda actors, device: nullcontext({}))
    monkeypatch.setattr("genrl.diffusion.train.RayRollouts", Near)
