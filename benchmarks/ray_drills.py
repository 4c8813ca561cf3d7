"""Kills at random moments in a run whose samples are drawn on a Ray cluster of two nodes (`benchmarks.drills`)."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.drill import Row, begun, config_of, newest
from genrl.config import dump, load
from genrl.runtime.folder.run import Run, read_metrics
from genrl.runtime.loop import frame
from tests import ray_nodes, run_folders

STRIKES = {"rollout worker": b"ray::RolloutActor", "reward worker": b"ray::RewardActor", "node": b"", "trainer": b""}
"""Name -> how the command line of one to strike begins, where there are several."""
LONG_S = 300.0
"""Without a new iteration for so long, a run hangs."""


def killed_on_ray(kills: int, chance: random.Random) -> Iterator[Row]:
    """SIGKILL to a rollout or reward worker, to all that runs on a node (which comes back), or to the process that
    trains (which is started again), at random moments; then the run goes on to its end. With samples drawn ahead of
    training."""
    if find_spec("ray") is None:
        yield Row("killed on Ray: Ray is not installed", 0, 0, "-")
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with ray_nodes.started(1, cpus=2) as nodes, tempfile.TemporaryDirectory() as place:
        yield _killed(nodes, Path(place), kills, chance)


def _killed(nodes: Any, folder: Path, kills: int, chance: random.Random) -> Row:
    run, path, log = folder / "cut", folder / "run.yaml", folder / "log"
    more = {"optimizer.schedule": "constant", "sampling.staleness": 1, "sampling.batch_size": 8}
    alone = config_of("flow_grpo.yaml", run, 10**6, **more)
    there = {"engine.rollout_workers": 2, "engine.reward_workers": 1}
    os.environ["RAY_ADDRESS"] = nodes.address  # which the killed processes inherit
    path.write_text(dump(config_of("flow_grpo.yaml", run, 10**6, **more, **there)))
    node, process = nodes.add_node(num_cpus=2), begun(path, run, log)
    counts, notes = dict.fromkeys(STRIKES, 0), list[str]()
    for number in range(kills):
        if not _goes_on(process, run):
            notes.append(f"kill {number + 1}: the run ended or hung: {log.read_text()[-300:]}")
            process.kill()
            process.join()
            process = begun(path, run, log)
            continue
        time.sleep(chance.uniform(0.0, 3.0))
        what = chance.choice(list(STRIKES))
        counts[what] += 1
        if what == "trainer":
            process.kill()
            process.join()
            process = begun(path, run, log)
        elif what == "node":
            nodes.remove_node(node, allow_graceful=False)
            node = nodes.add_node(num_cpus=2)
        elif workers := _named(STRIKES[what]):
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(chance.choice(workers), signal.SIGKILL)
    if not _goes_on(process, run):
        notes.append(f"after the last kill the run ended or hung: {log.read_text()[-300:]}")
    process.kill()
    process.join()
    last = newest(run) + 2
    (folder / "alone.yaml").write_text(dump(alone))
    straight = frame.train(load(folder / "alone.yaml", [f"iterations={last}", f"output={folder / 'whole'}"]))
    notes += run_folders.differences(straight, frame.train(load(path, [f"iterations={last}"]), run))
    lost = "work since the last save" if not notes else "; ".join(notes)[:200]
    named = ", ".join(f"{count} x {what}" for what, count in counts.items())
    return Row(f"killed on Ray ({named})", kills, kills - len(notes), lost, tuple(notes[:20]))


def _goes_on(process: Any, run: Path) -> bool:
    """Wait for one more iteration."""
    before, until = _rows(run), time.monotonic() + LONG_S
    while process.exitcode is None and time.monotonic() < until:
        if _rows(run) > before:
            return True
        process.join(0.1)
    return False


def _rows(run: Path) -> int:
    """Finished iterations."""
    rows = read_metrics(Run(run).metrics) if Run(run).metrics.is_file() else []
    return int(rows[-1]["step"]) if rows else -1


def _named(beginning: bytes) -> list[int]:
    """Processes of this machine whose command line begins so."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(beginning):
                processes.append(int(folder.name))
    return processes
