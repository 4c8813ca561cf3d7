"""Scaling: the same pictures per process (or, `--strong`, in all) by 1, 2 and 4 processes. What of it is the program's.

    python -m benchmarks.scaling [configs/quickstart.yaml] [--processes 1 2 4] [--iterations 4] [--strong]

`prompts_per_iteration` grows with the number of processes, each of which has one thread; not with `--strong`.
Wall-clock times of several processes say something where every process has a core to itself, and nothing else runs. So
each process measures

- its work between two collectives, in seconds of the processor, which are the same whether it had to wait for one;
- the collectives themselves by the wall clock, from a barrier on that is met before each: of the processes the least,
  so that waiting for others is in none of them. (On a busy machine that is still too much, never too little.)

Between two collectives everybody waits for the slowest: an iteration on free cores takes the sum of the most work of
any process between two of them, and of the collectives. `efficiency` is the pictures per second and process over those
of one process alone; beside it stands what the wall clock says here. It leaves out what processes on one machine do to
each other by sharing caches, memory and clock rate, and networks. Writes scaling.json.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import clock, opened, parser, save, train
from genrl.config import load
from genrl.diffusion.config.schema import Config

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_single", "reduce_scatter_single"),
    *("gather_object", "broadcast", "barrier"),
)
Iteration = dict[str, Any]
"""Of one process: `work`, CPU seconds before each collective and after the last; `collectives`, wall seconds of each;
`bytes`, of the tensors that this process gave to each kind of them; `wall`, seconds of the iteration, barriers
included."""


class Meter:
    """Takes the time of work and of collectives in this process."""

    def __init__(self) -> None:
        self.barrier = torch.distributed.barrier
        self.iterations: list[Iteration] = []
        self._inside = False
        self.begin()
        for name in COLLECTIVES:
            setattr(torch.distributed, name, self._measured(name, getattr(torch.distributed, name)))

    def begin(self) -> None:
        self._work: list[float] = []
        self._collectives: list[float] = []
        self._bytes: dict[str, int] = {}
        self._started = self._since = clock()

    def end(self) -> None:
        now = clock()
        work = [*self._work, (now - self._since).cpu]
        wall = (now - self._started).wall
        self.iterations.append({"work": work, "collectives": self._collectives, "bytes": self._bytes, "wall": wall})
        self.begin()

    def _measured(self, name: str, collective: Any) -> Any:
        @functools.wraps(collective)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return collective(*args, **kwargs)
            self._inside = True
            self._bytes[name] = self._bytes.get(name, 0) + _given(name, args, kwargs)
            self._work.append((clock() - self._since).cpu)
            self.barrier()
            began = clock()
            try:
                return collective(*args, **kwargs)
            finally:
                self._since = clock()
                self._collectives.append((self._since - began).wall)
                self._inside = False

        return measured


def _given(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of the tensor that a process gives to a collective; 0 of objects."""
    takes_output_first = name in ("all_gather", "all_gather_single", "reduce_scatter_single")
    given = [*args, *kwargs.values()][1 if takes_output_first else 0 :]
    tensor = next((value for value in given if isinstance(value, torch.Tensor)), None)
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def worker(path: str, changes: Sequence[str]) -> list[Iteration]:
    """One process of a run; the iterations after the first."""
    config = load(path, changes)
    assert isinstance(config, Config)
    with ExitStack() as stack:
        session = opened(config, stack)
        meter, finish = Meter(), session.finish

        def finished(metrics: Any) -> None:
            finish(metrics)
            meter.end()

        session.finish = finished  # type: ignore[method-assign]
        train(session)
        if torch.distributed.is_initialized():
            meter.barrier()
            torch.distributed.destroy_process_group()
    return meter.iterations[1:]


def measure(
    path: str, processes: int, iterations: int, changes: Sequence[str] = (), *, strong: bool = False
) -> dict[str, Any]:
    """A run by so many processes, in the process group (and session) of this one."""
    published = load(path, changes)
    assert isinstance(published, Config)
    sampling, times = published.sampling, 1 if strong else processes
    changes = (
        *changes,
        f"sampling.prompts_per_iteration={sampling.prompts_per_iteration * times}",
        f"iterations={iterations + 1}",
        *("evaluation.every=0", "checkpoint.every=1000000", "trackers=[]"),
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = {} if processes == 1 else {"WORLD_SIZE": processes, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    with TemporaryDirectory() as folder:
        started = []
        for rank in range(processes):
            ranks = {"RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {}
            settings = {"OMP_NUM_THREADS": 1, "OMP_WAIT_POLICY": "PASSIVE", **group, **ranks}
            command = [sys.executable, "-m", "benchmarks.scaling", path, "--worker", f"{folder}/{rank}.json"]
            environment = os.environ | {name: str(value) for name, value in settings.items()}
            started.append(subprocess.Popen([*command, "--set", *changes], env=environment))
        codes = [one.wait() for one in started]
        if any(codes):
            raise RuntimeError(f"the processes ended with {codes}")
        of_ranks = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(processes)]
    return summary(of_ranks) | {"pictures": sampling.images_per_iteration * times, "ranks": of_ranks}


def summary(ranks: list[list[Iteration]]) -> dict[str, Any]:
    """Medians over the iterations, from those of every process. Seconds of an iteration: `work`, a process's mean;
    `waiting`, for the slowest; `collectives`; `iteration`, their sum; `wall`, as it was here."""
    rows = []
    for processes in zip(*ranks, strict=True):
        work = [max(pieces) for pieces in zip(*(one["work"] for one in processes), strict=True)]
        talk = [min(pieces) for pieces in zip(*(one["collectives"] for one in processes), strict=True)]
        own = mean(sum(one["work"]) for one in processes)
        wall = max(one["wall"] for one in processes)
        rows.append((own, sum(work) - own, sum(talk), sum(work) + sum(talk), wall, float(len(talk))))
    names = ("work", "waiting", "collectives", "iteration", "wall", "number_of_collectives")
    row: dict[str, Any] = {name: median(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
    return row | {"bytes": ranks[0][-1]["bytes"]}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    arguments.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4], help="the first must be 1")
    arguments.add_argument("--iterations", type=int, default=4, help="after the first; default: 4")
    arguments.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to the configuration")
    arguments.add_argument("--strong", action="store_true", help="the same pictures by any number of processes")
    arguments.add_argument("--worker", type=Path, help="for the processes that this program starts")
    given = arguments.parse_args()
    if given.worker is not None:
        given.worker.write_text(json.dumps(worker(given.config, given.set)))
        return
    if given.processes[0] != 1:
        arguments.error("--processes: the first must be 1, which the others are compared with")
    results = {
        count: measure(given.config, count, given.iterations, given.set, strong=given.strong)
        for count in given.processes
    }
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    print(f"{cores} cores, load {load:.1f}")
    print(
        "| processes | work, CPU s | waiting for the slowest, s | collectives, s | iteration, s | efficiency "
        "| by the wall clock here |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for count, row in results.items():
        share = row["pictures"] / results[1]["pictures"] / count
        row["efficiency"] = share * results[1]["iteration"] / row["iteration"]
        row["wall_efficiency"] = share * results[1]["wall"] / row["wall"]
        says = f"{row['wall_efficiency']:.2f}" if count <= cores else "nothing: too few cores"
        sent = f"{row['number_of_collectives']:.0f}, {sum(row['bytes'].values()) / 1e6:.3g} MB"
        print(
            f"| {count} | {row['work']:.2f} | {row['waiting']:.2f} | {row['collectives']:.3f} ({sent}) | "
            f"{row['iteration']:.2f} | {row['efficiency']:.2f} | {says} |"
        )
    save(given.out, "scaling", results)


if __name__ == "__main__":
    main()
