"""What the benchmarks share: where results go, clocks, and trainers whose iterations take turns in one process."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from genrl.cli.doctor import examine
from genrl.config import RunConfig
from genrl.diffusion.config.schema import Config
from genrl.diffusion.methods.diffusion_nft import train as diffusion_nft
from genrl.diffusion.methods.diffusion_nft.settings import DiffusionNFT
from genrl.diffusion.methods.flow_grpo import train as flow_grpo
from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import open_run
from genrl.runtime.folder.metrics import MetricLogger
from genrl.runtime.folder.run import Run, write_atomic
from genrl.runtime.loop.process import Process, make_accelerator
from genrl.runtime.loop.progress import Progress
from genrl.runtime.loop.signals import Stop, Watchdog

RESULTS = Path(__file__).parent / "results"
_DESCRIBE = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]


def _commit() -> str | None:
    if named := os.environ.get("GENRL_COMMIT"):
        return named
    if shutil.which("git") is None:
        return None
    return subprocess.run(_DESCRIBE, cwd=RESULTS.parent, capture_output=True, text=True).stdout.strip() or None


COMMIT = _commit()
"""What ran, as it was when the benchmark began; `-dirty` where files were changed. GENRL_COMMIT says it where there is
a copy without its history."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Of a benchmark: its docstring is what --help says. Torch gets one thread, so that seconds of the processor are
    those of the work and not of threads that wait for each other."""
    torch.set_num_threads(1)
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON; default: benchmarks/results")
    return made


def save(folder: Path, name: str, results: Any) -> None:
    """Write `folder/name.json`: the figures, and what is needed to judge them."""
    report = examine()
    about = {
        "command": " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]]),
        "commit": COMMIT,
        "load": os.getloadavg()[0],
        **{section: report[section] for section in ("packages", "torch", "threads")},
    }
    write_atomic(folder / f"{name}.json", json.dumps({"about": about, "found": results}, indent=1) + "\n")


class Seconds(NamedTuple):
    """Of the wall clock, and of this process on its processors: on a busy machine only the second says much."""

    wall: float
    cpu: float

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def clock() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


class Parts:
    """Seconds by (phase, part). A part within another is taken out of it, so that the parts add up to the whole."""

    def __init__(self) -> None:
        self.phase = ""
        self._spent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._open, self._since = ["the rest"], clock()

    def _charge(self) -> None:
        now = clock()
        spent, passed = self._spent[self.phase, self._open[-1]], now - self._since
        spent[0] += passed.wall
        spent[1] += passed.cpu
        self._since = now

    def enter(self, phase: str) -> None:
        """From here on it is another phase."""
        self._charge()
        self.phase = phase

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Count what `owner.method` takes as this part."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)

    def take(self) -> dict[tuple[str, str], Seconds]:
        """What was spent since it was last taken."""
        self._charge()
        taken = {key: Seconds(*spent) for key, spent in self._spent.items()}
        self._spent.clear()
        return taken


def opened(config: Config, stack: ExitStack) -> DiffusionRun:
    """A run of this configuration in a folder that is gone when the stack ends; nothing is trained yet.

    Raises ValueError for what `genrl train` sets up after it.
    """
    if config.kernels.compile or config.sampling.fit_batch:
        raise ValueError("kernels.compile and sampling.fit_batch are not measured here: leave them out")
    return open_run(config, alone(config, stack), None, stack)


def alone(config: RunConfig, stack: ExitStack) -> Process:
    """The one process of a run in a folder that is gone when the stack ends."""
    folder = Run(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run")
    accelerator = make_accelerator(config.distributed.timeout_s)
    log = MetricLogger(folder, (), enabled=True)
    stack.callback(log.finish)
    watchdog = stack.enter_context(Watchdog(folder, 3600))
    return Process(accelerator, folder, log, Progress(1, enabled=False), watchdog, Stop())


def train(run: DiffusionRun) -> None:
    """The trainer's own loop, to its end."""
    settings = run.config.trainer
    if isinstance(settings, FlowGRPO):
        flow_grpo.train(run, settings)
    elif isinstance(settings, DiffusionNFT):
        diffusion_nft.train(run, settings)
    else:
        raise ValueError(f"trainer.algorithm: {settings.algorithm} is not measured here; flow_grpo, diffusion_nft are")


class Turns:
    """A loop in a thread of its own that waits between its iterations: `next` runs one, then it waits again.

    Several of them share a process and its machine, so that A B A B ... compares like with like. `close` ends it.
    """

    def __init__(self, loop: Callable[[Callable[[], None]], None]) -> None:
        """loop: is given what it is to call at the end of every iteration."""
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._closed, self._error = False, None
        self._thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
        self._thread.start()

    def _run(self, loop: Callable[[Callable[[], None]], None]) -> None:
        self._go.acquire()
        try:
            if not self._closed:
                loop(self._wait)
        except _Closed:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            self._error = error
        self._closed = True
        self._done.release()

    def _wait(self) -> None:
        self._done.release()
        self._go.acquire()
        if self._closed:
            raise _Closed

    def next(self) -> None:
        """One more iteration. Raises what the loop raised, and RuntimeError where it has none left."""
        if self._closed:
            raise RuntimeError("the loop has ended")
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._go.release()
        self._thread.join()


class _Closed(Exception):
    """Leaves the loop of a `Turns` that is closed."""


def beside(
    doc: str | None, name: str, unit: str, other: str, measure: Callable[[int, list[str]], dict[str, Any]]
) -> None:
    """The command of a benchmark in which a peer and genrl take turns: arguments, a line of what was measured, and
    the file `name`. unit: what the result counts of a round; other: what the peer is called."""
    arguments = parser(doc)
    arguments.add_argument("--rounds", type=int, default=5, help="after the first; default: 5")
    arguments.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to the configuration")
    given = arguments.parse_args()
    results = measure(given.rounds, given.set)
    low, high = results["range"]
    print(
        f"{results[unit]} {unit}: {results['theirs_s']:.2f} CPU s by {other}, {results['ours_s']:.2f} by genrl; "
        f"{results['times_faster']:.2f} ({low:.2f} to {high:.2f}) times as fast"
    )
    save(given.out, name, results)


def turns_taken(spent: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the rounds after the first: medians of the seconds of either, and of the ratio of neighbours; its range.
    spent: of each round `theirs` and `ours`, as a mapping of what `clock` gives."""
    counted = spent[1:]
    ratios = [one["theirs"]["cpu"] / one["ours"]["cpu"] for one in counted]
    return {
        "theirs_s": median(one["theirs"]["cpu"] for one in counted),
        "ours_s": median(one["ours"]["cpu"] for one in counted),
        "times_faster": median(ratios),
        "range": [min(ratios), max(ratios)],
        "rounds": list(spent),
    }
