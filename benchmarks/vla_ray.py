"""Rollouts of MiniTable on 1, 2 and 4 Ray actors of this machine: environment steps per second, and per CPU-second.

    python -m benchmarks.vla_ray [--repeats 3] [--decisions 20] [--actors 1 2 4]

512 tables from states, chunks of 4, the embedded flow policy, one thread per actor. All actors are started first; then
every repeat collects one rollout with each number of them, in turn, so that a ratio compares rollouts of one minute.
With more actors than free cores, or beside other programs, only steps per CPU-second of the actors mean anything: what
it costs to share the work. Prints a table and writes vla_ray.json.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import psutil
import ray

from benchmarks.common import parser, save
from genrl.vla.rollout.collect import RolloutPlan
from genrl.vla.rollout.ray_rollout import RayRollouts
from genrl.vla.rollout.sampling import FlowSteps
from genrl.vla.simulators.contract import Simulation
from tests import ray_nodes
from tests.vla.tiny_policies import FACTS, flow

TABLES = 512


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--decisions", type=int, default=20)
    arguments.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4])
    given = arguments.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}  # as this process, not less
    ray.init(num_cpus=sum(given.actors), include_dashboard=False, log_to_driver=False)
    simulated = Simulation("minitable", num_envs=TABLES, chunk=4)
    far = {
        count: RayRollouts(simulated, actors=count, start_timeout_s=600.0, timeout_s=600.0) for count in given.actors
    }
    policy = flow(FACTS, critic=1)
    by_count: dict[int, list[dict[str, float]]] = {count: [] for count in given.actors}
    for repeat in range(given.repeats + 1):  # the first one makes the tables, and is not counted
        for count, rollouts in far.items():
            plan = RolloutPlan(decisions=given.decisions, seed=0, iteration=repeat)
            row = measure(rollouts, policy, plan)
            if repeat:
                by_count[count].append(row)
    rows = {count: {name: [row[name] for row in own] for name in own[0]} for count, own in by_count.items()}
    one = rows[given.actors[0]]
    print("| actors | steps/s | against the first, each repeat | steps per CPU-second of the actors |")
    print("| --- | --- | --- | --- |")
    for count, own in rows.items():
        ratios = [a / b for a, b in zip(own["steps_per_s"], one["steps_per_s"], strict=True)]
        cells = [f"{median(own['steps_per_s']):,.0f}", ", ".join(f"{ratio:.2f}" for ratio in ratios)]
        print(f"| {count} | {' | '.join(cells)} | {median(own['steps_per_cpu_s']):,.0f} |")
    save(given.out, "vla_ray", {str(count): own for count, own in rows.items()})
    for rollouts in far.values():
        rollouts.close()
    ray.shutdown()


def measure(rollouts: RayRollouts, policy: Any, plan: RolloutPlan) -> dict[str, float]:
    """One rollout's steps per second of the clock, and per second of the actors' processors."""
    cpu, begun = cpu_seconds(rollouts), time.perf_counter()
    rollout = rollouts.collect(policy, FlowSteps(), plan)
    spent, steps = time.perf_counter() - begun, float(rollout.n_executed.sum())
    used = cpu_seconds(rollouts) - cpu
    return {"steps_per_s": steps / spent, "steps_per_cpu_s": steps / used if used else float("nan")}


def cpu_seconds(rollouts: RayRollouts) -> float:
    """Of the actors, so far; 0 before they are started."""
    workers = [] if rollouts.crew is None else rollouts.crew.workers
    times = [psutil.Process(ray_nodes.process_of(worker.actor)).cpu_times() for worker in workers]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main()
