"""Every method, with its samples drawn by a rollout worker that has a pipeline of its own: to the bit, or refused.

No Ray here: the worker is called in this process, and what would cross the network is pickled.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from genrl.config import Config, ConfigError, load
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.rollout import ray_rollouts
from genrl.diffusion.rollout.forest import Draw
from genrl.diffusion.rollout.ray_rollouts import RolloutActor, Work, unpacked
from genrl.diffusion.rollout.rollout import Finished, Job, Source, Worker
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.test_resume_all import FILES, ROOT, shrunken

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

REFUSED = {"spo": "candidates", "dpo_offline": "nothing to draw"}


class Near:
    """In the place of `RayRollouts`."""

    def __init__(self, config: Config, count: int, device: object) -> None:
        self.actor, self.version = RolloutActor(), 0
        self.actor.open(config.model_dump_json(), os.getcwd(), 1)

    def ready(self) -> None: ...

    def close(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def source(self, policy: Policy, weights: Mapping[str, Tensor], draw: Draw, worker: Worker) -> Source:
        self.version += 1
        orders = pickle.dumps((draw, dict(weights)))

        def drawn(jobs: Iterable[Job]) -> Iterator[tuple[int, Finished]]:
            for job in jobs:
                work = pickle.loads(pickle.dumps(Work(self.version, orders, job)))  # noqa: S301
                part = pickle.loads(pickle.dumps(self.actor.draw(work)))  # noqa: S301
                assert part.version == self.version
                policy.model_calls += part.model_calls
                yield job.position, unpacked(part.finished, policy.device)

        return drawn


@pytest.mark.parametrize("name", [name for name in FILES if name not in REFUSED])
def test_same_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    here = train(shrunken(FILES[name], tmp_path / "here"))
    ray: Any = SimpleNamespace(get_gpu_ids=list, get=pickle.loads)
    monkeypatch.setattr(ray_rollouts, "connected", lambda: ray)
    monkeypatch.setattr("genrl.diffusion.train.cluster", lambda address, accelerator: nullcontext())
    monkeypatch.setattr("genrl.diffusion.train.RayRollouts", Near)
    config = shrunken(FILES[name], tmp_path / "there")
    engine = {"kind": "ray", "rollout_workers": 1}
    there = train(Config.model_validate(config.model_dump(mode="json") | {"engine": engine}))
    assert runs.differences(here, there) == []


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        load(FILES[name], ["engine.kind=ray", "engine.rollout_workers=1"])
