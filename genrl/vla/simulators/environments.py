"""Every simulator by one function, as what a rollout steps: a vector environment whose action is a chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.config.plugins import find
from genrl.mdp.noise import derive_seed
from genrl.vla.config.names import SIMULATORS
from genrl.vla.simulators import ray_workers, simulator
from genrl.vla.simulators.contract import Environment, Simulation
from genrl.vla.simulators.tables import Simulators
from genrl.vla.simulators.workers import Inline, Process

ONE_CAMERA = ("minitable", "metaworld", "maniskill", "point_maze", "fetch", "reacher")


def open_environment(wanted: Simulation) -> Environment:
    """Slots of a simulator; nothing is started before the first reset. Raises ValueError for what does not fit
    together."""
    name, told = wanted.name, (wanted.tasks, wanted, dict(wanted.settings))
    if name in ONE_CAMERA and wanted.cameras:
        raise ValueError(
            f"{name} has one camera, observation.image; the policy reads {list(wanted.cameras)}: write policy.rename "
            f"{{observation.image: observation.images.{wanted.cameras[0]}}}, which leaves others empty"
        )
    if wanted.cost_key is not None and name in SIMULATORS.built_in:
        raise ValueError(f"environment.cost_key: {name} knows no costs, gymnasium environments may; leave it out")
    described = find(name, SIMULATORS)(*told) if name in SIMULATORS.built_in else simulator.describe(name, *told)
    if wanted.workers == "ray":
        return Simulators(described, wanted, ray_workers.Actor, ray_workers.actors(wanted.ray_actors))
    kind: Any = Process if wanted.workers else Inline
    return Simulators(described, wanted, kind, wanted.workers or 1)


def evaluation_episodes(seed: int, count: int) -> NDArray[np.uint64]:
    """Numbers of `count` episodes, a function of the seed: consecutive, so that all tasks get (nearly) equally many."""
    return np.uint64(derive_seed(seed, "evaluation")) + np.arange(count, dtype=np.uint64)
