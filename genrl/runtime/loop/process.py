"""One process of one run: its accelerator, its folder, its log, what it shows, and what stops it.

Settings of the whole process that a reward, simulator or pipeline may change, put back where a phase begins: with
other threads or another precision a resumed run would not equal an uninterrupted one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from genrl.config import RunConfig, dump
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder import run as run_folder
from genrl.runtime.folder.metrics import MetricLogger, logged_by
from genrl.runtime.folder.run import Run, Script
from genrl.runtime.loop.progress import Progress
from genrl.runtime.loop.signals import PATIENCE, Stop, Watchdog, catch_stop, read_heartbeat
from genrl.runtime.weights.devices import default_device, peak_bytes, resident_peak_bytes, without_cudnn_attention

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """The folder of a run that this process has begun or goes on with, and the checkpoint from which, if it has one."""

    run: Run
    last_checkpoint: Path | None
    resumes: bool

    @property
    def start(self) -> int:
        """Iterations that are finished."""
        return int(self.last_checkpoint.name.removeprefix("step-")) if self.last_checkpoint else 0


@dataclass(frozen=True)
class Process:
    """What every part of a run may use."""

    accelerator: Accelerator
    run: Run
    log: MetricLogger
    progress: Progress
    watchdog: Watchdog
    stop: Stop
    context: int = 1
    """Processes, one after the other, that compute each sample together."""
    in_script: bool = False
    """Whether a script trains, not the command line."""
    config: str = ""
    """The configuration that this process trains by, as YAML."""
    started: str = ""
    """When the run began, by its run.json."""

    @property
    def has_folder(self) -> bool:
        """Whether the run's folder is there and its own, and was not moved, removed or given to another run."""
        if not self.started:
            return True
        begun = run_folder.run_info(self.run).get("started")
        # One that was made anew by what is written meanwhile has neither file.
        return begun == self.started or (begun is None and (self.run.folder / "run.lock").is_file())

    def check_folder(self) -> None:
        """Raise RuntimeError where it does not have its folder any more."""
        if not self.has_folder:
            raise RuntimeError(
                f"the run folder {self.run.folder} was moved, removed or replaced while the run was going: stopped, "
                "and nothing was written there. Put it back, and `genrl resume` goes on from its last checkpoint."
            )

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def replica(self) -> int:
        """Which of the processes, or groups that compute together, among which samples are shared out."""
        return self.rank // self.context

    @property
    def replicas(self) -> int:
        """How many of them there are."""
        return int(self.accelerator.num_processes) // self.context

    @property
    def member(self) -> int:
        """Which one of its group this process is."""
        return self.rank % self.context

    def share(self, number: int) -> range:
        """This process's part of 0 to number - 1; the parts differ by one at most, the larger ones come first."""
        size, more = divmod(number, int(self.accelerator.num_processes))
        first = self.rank * size + min(self.rank, more)
        return range(first, first + size + (self.rank < more))


def claim(stack: ExitStack, output: str, resume: Path | None, accelerator: Accelerator) -> Claim:
    """Lock the folder `resume`, or else that of a new run, until the stack ends. Writes nothing that stays.

    Raises ValueError, in all processes, where the run has checkpoints and cannot go on from them.
    """
    run = Run((resume or Path(output)).absolute())  # a reward may go to another folder
    # One lock for all processes, which share the folder and end together.
    if accelerator.is_main_process:
        stack.callback(lock(run.folder).release)
    return Claim(run, _to_resume(run, accelerator) if resume else None, resume is not None)


def lock(folder: Path) -> FileLock:
    """Hold the run for this process until the returned lock is released, or as a context ends. The system frees it even
    after kill -9.

    Raises ValueError where another live process holds it, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A lock of the system's, not a file that is there or not: it goes with its process, however that ends.
        held = FileLock(folder / "run.lock", timeout=0)
        held.acquire()
    except Timeout:
        raise ValueError(
            f"another process is training in {folder}{_holder(folder)}: wait for it, or choose another output=FOLDER. "
            f"It holds {folder / 'run.lock'}: delete that file only if its machine is gone."
        ) from None
    except OSError as error:
        raise ValueError(
            f"the run folder {folder} cannot be written to: {error.strerror}. Make it writable, or choose another one "
            "with output=FOLDER."
        ) from None
    return held


def _holder(folder: Path) -> str:
    """Which process, as far as its heartbeat tells."""
    heartbeat = read_heartbeat(folder / "heartbeat" / "rank-0.json")
    if heartbeat is None:
        return ""
    when = datetime.fromtimestamp(heartbeat.time, UTC).isoformat(timespec="seconds")
    return f" (process {heartbeat.pid} on {heartbeat.host}, which last made progress at {when})"


def _to_resume(run: Run, accelerator: Accelerator) -> Path | None:
    """`checkpoint.to_resume`, read by the main process alone: the files may be large, and one is enough to judge."""
    path, problem = None, ""
    if accelerator.is_main_process:
        try:
            path = checkpoint.to_resume(run.checkpoints)
        except ValueError as error:
            problem = str(error)
    if accelerator.num_processes > 1:
        path, problem = broadcast_object_list([path, problem])
    if problem:
        raise ValueError(problem)
    return path


def begin(
    stack: ExitStack,
    claimed: Claim,
    config: RunConfig,
    accelerator: Accelerator,
    *,
    unit: str,
    script: Script | None = None,
) -> Process:
    """Write what a run begins with; from here on signals are caught and progress is shown. The watchdog is not entered
    yet: loading has no progress to tell it. unit: of progress. script: that which trains, if it is not the command
    line."""
    text = dump(config)
    if accelerator.is_main_process:
        # Else the ones that are left would be taken for processes of this start.
        for old in (claimed.run.folder / "heartbeat").glob("*"):  # of processes that were killed
            old.unlink()
        run_folder.prepare(
            claimed.run.folder,
            text,
            seed=config.seed,
            processes=accelerator.num_processes,
            resumed_from=claimed.start if claimed.resumes else None,
            last_checkpoint=claimed.last_checkpoint,
            script=script,
        )
    # No process writes into the folder before the main one has prepared it.
    accelerator.wait_for_everyone()
    stop = stack.enter_context(catch_stop(ends_process=script is None))
    # NCCL waits for other ranks in a busy loop, which looks like work.
    spins = accelerator.num_processes > 1 and accelerator.device.type != "cpu"
    watchdog = Watchdog(claimed.run, config.distributed.timeout_s, rank=accelerator.process_index, spins=spins)
    progress = Progress(config.iterations, start=claimed.start, enabled=accelerator.is_main_process, unit=unit)
    stack.enter_context(progress)
    log = MetricLogger(
        claimed.run,
        config.trackers,
        config=config.model_dump(mode="json"),
        resumed_from=claimed.start,
        enabled=accelerator.is_main_process,
        own=logged_by(config),
    )
    stack.callback(log.finish)
    context, started = config.together, run_folder.run_info(claimed.run).get("started", "")
    return Process(accelerator, claimed.run, log, progress, watchdog, stop, context, script is not None, text, started)


def make_accelerator(timeout_s: float) -> Accelerator:
    """accelerate's process group and device; nothing is wrapped by it, so models keep their own modules."""
    without_cudnn_attention()
    return Accelerator(
        cpu=default_device() == "cpu",
        # the watchdog ends what hangs; the group's own clock goes on while processes are stopped
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=PATIENCE * timeout_s))],
    )


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process since its start, in MiB: on the device, or resident where that is the CPU."""
    return (resident_peak_bytes() if device.type == "cpu" else peak_bytes(device)) / 2**20


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _enter(folder: str | None) -> None:
    with suppress(OSError):
        if folder is not None:
            os.chdir(folder)


# What libraries are known to change behind one's back, and what would change numbers or files; each with its getter and
# setter.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the current folder": (_folder, _enter),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
}


@dataclass
class GlobalSettings:
    """These settings as they were when this object was made."""

    values: dict[str, Any] = field(default_factory=lambda: {name: get() for name, (get, _) in _SETTINGS.items()})
    warned: set[str] = field(default_factory=set)

    def put_back(self) -> None:
        """What was changed since; the first time with a warning."""
        for name, (get, put) in _SETTINGS.items():
            now, before = get(), self.values[name]
            if now == before:
                continue
            put(before)
            if name not in self.warned:
                self.warned.add(name)
                logger.warning("%s was changed to %s by a reward or other code: put back to %s", name, now, before)
