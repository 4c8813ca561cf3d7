"""Environment steps per second by simulator and number of worker processes.

    python -m benchmarks.vla_throughput [--seconds 4] [--workers 0 1 2 ray] [--only metaworld]

Random actions through `open_environment`, a chunk per decision and one observation per chunk, as in a rollout without
a policy. Steps are executed actions; resets take time and execute none. Wall-clock figures depend on what else the
machine does: beside them stand steps per CPU-second of this process and its children together (Ray's actors are none).
Simulators that are not installed are left out. Prints a table and writes vla_throughput.json.
"""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any

import numpy as np
import psutil

from benchmarks.common import parser, save
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment

ARM = {"num_envs": 48, "chunk": 8, "tasks": ("reach-v3", "push-v3", "pick-place-v3"), "max_steps": 80}
MAZE = {"num_envs": 64, "chunk": 16, "tasks": ("umaze",), "max_steps": 160}
HAND = {"num_envs": 64, "chunk": 4}
PLANE = {"num_envs": 64, "chunk": 8, "max_steps": 32}
FETCH = {"num_envs": 16, "chunk": 8, "proprioception": 3, "instruction": "push the box to the goal"}
KITCHEN = {"num_envs": 2, "chunk": 8, "tasks": ("libero_object/1",), "timeout_s": 600.0, "start_timeout_s": 600.0}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "minitable, state": ("genrl", "minitable", {"num_envs": 512, "chunk": 4}),
    "minitable, 32 px": ("genrl", "minitable", {"num_envs": 512, "chunk": 4, "image_size": 32}),
    "metaworld, state": ("metaworld", "metaworld", ARM),
    "metaworld, 64 px": ("metaworld", "metaworld", ARM | {"image_size": 64}),
    "metaworld, 84 px": ("metaworld", "metaworld", ARM | {"image_size": 84}),
    "metaworld, 224 px": ("metaworld", "metaworld", ARM | {"image_size": 224}),
    "point maze, state": ("gymnasium_robotics", "point_maze", MAZE),
    "point maze, 32 px": ("gymnasium_robotics", "point_maze", MAZE | {"image_size": 32}),
    "fetch, state": ("gymnasium_robotics", "fetch", HAND),
    "fetch, 64 px": ("gymnasium_robotics", "fetch", HAND | {"image_size": 64}),
    "reacher, state": ("mujoco", "reacher", PLANE),
    "reacher, 32 px": ("mujoco", "reacher", PLANE | {"image_size": 32}),
    "pusht, state": ("gym_pusht", "gym_pusht/PushT-v0", {"num_envs": 16, "chunk": 8, "proprioception": 2}),
    "pusht, 96 px": ("gym_pusht", "gym_pusht/PushT-v0", {"num_envs": 16, "chunk": 8, "image_size": 96}),
    "libero, state": ("libero", "libero", KITCHEN),
    "libero, two of 256 px": ("libero", "libero", KITCHEN | {"image_size": 256, "cameras": ("image", "image2")}),
    "fetch push, state": ("gymnasium_robotics", "FetchPush-v4", FETCH),
}


def measure(name: str, settings: dict[str, Any], workers: int | str, seconds: float) -> dict[str, float]:
    """Seconds to start, then steps and decisions per second and steps per CPU-second."""
    env = open_environment(Simulation(name, workers=workers, ray_actors=2, **settings))
    rng = np.random.default_rng(0)
    begun = time.perf_counter()
    env.reset(seed=0)
    start = time.perf_counter() - begun
    shape = (env.num_envs, env.chunk, env.action_dim)
    actions = rng.uniform(-1.0, 1.0, shape).astype(np.float32)
    env.step(actions)
    steps = decisions = 0
    cpu, begun = cpu_seconds(), time.perf_counter()
    while (spent := time.perf_counter() - begun) < seconds:
        steps += int(env.step(actions)[4]["n_executed"].sum())
        decisions += env.num_envs
    used = cpu_seconds() - cpu
    assert env.dropped == 0
    env.close()
    return {
        "start_s": start,
        "steps_per_s": steps / spent,
        "decisions_per_s": decisions / spent,
        "steps_per_cpu_s": steps / used,
    }


def cpu_seconds() -> float:
    """Of this process and its children."""
    own = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in [own, *own.children(recursive=True)])


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=4.0)
    arguments.add_argument("--workers", nargs="+", default=["0", "1", "2"], help='numbers, or "ray" for two actors')
    arguments.add_argument("--only", default="", help="cases whose name begins so")
    given = arguments.parse_args()
    rows = []
    columns = ["simulator", "workers", "start, s", "steps/s", "decisions/s", "steps per CPU-s", "load"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for case, (package, name, settings) in CASES.items():
        if not case.startswith(given.only):
            continue
        if importlib.util.find_spec(package) is None:
            print(f"| {case} | {package} is not installed |")
            continue
        for workers in given.workers:
            speeds = measure(name, settings, workers if workers == "ray" else int(workers), given.seconds)
            load = os.getloadavg()[0]
            rows.append({"case": case, "workers": workers, "load": load, "cpus": os.cpu_count()} | settings | speeds)
            print(
                f"| {case} | {workers} | {speeds['start_s']:.1f} | {speeds['steps_per_s']:,.0f} | "
                f"{speeds['decisions_per_s']:,.0f} | {speeds['steps_per_cpu_s']:,.0f} | {load:.1f} |",
                flush=True,
            )
    save(given.out, "vla_throughput", rows)


if __name__ == "__main__":
    main()
