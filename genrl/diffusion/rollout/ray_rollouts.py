"""Samples drawn by Ray actors: each holds the pipeline and draws and decodes the micro-batches that it is handed.

A sample is a function of its key and the weights (`rollout`), so it does not matter who draws it: an actor that is slow
gets fewer micro-batches, those of one that dies are drawn by another with the same bits, and the iteration is that of
the process that trains alone. What the trainer sends before each iteration, how samples are drawn and the trained
weights, has a version, which comes back with every micro-batch.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass, replace
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed
from torch import Tensor

from genrl.config.method import code_of
from genrl.diffusion.config.schema import Config
from genrl.diffusion.rollout.forest import Draw
from genrl.diffusion.rollout.rollout import (
    Finished,
    Finishing,
    Job,
    MicroBatch,
    Rollouts,
    Sheet,
    Worker,
    finish,
    gathered,
    handed_on,
    jobs_of,
)
from genrl.diffusion.rollout.scoring import Scorers, Scoring
from genrl.runtime.loop.frame import kind_of
from genrl.runtime.loop.ray_cluster import START_S, check_versions, connected, versions
from genrl.runtime.weights.devices import use_tf32, without_cudnn_attention
from genrl.runtime.weights.weights import put_back
from genrl_rewards.compose import Running

FAILURES = 3
"""Actors lost in a row, for each seat, after which the run ends."""


class Work(NamedTuple):
    """A micro-batch to draw."""

    version: int
    order: Any
    """Reference to (draw, trained weights by name) of this version."""
    job: Job


class Order(NamedTuple):
    """How the samples of an iteration are drawn."""

    version: int
    sent: Any
    """Reference to (draw, trained weights by name)."""


class Part(NamedTuple):
    """A micro-batch that was drawn, by the weights of this version."""

    finished: Finished
    version: int
    model_calls: int
    seconds: float


class RolloutActor:
    """The pipeline in another process."""

    version = 0

    def versions(self) -> dict[str, str]:
        """Versions of what computes here."""
        return versions()

    def open(self, config: str, folder: str, threads: int) -> dict[str, str]:
        """Load the pipeline of this configuration (JSON), as in the run that works in `folder` with so many threads;
        returns `versions`."""
        os.chdir(folder)  # paths in a configuration are relative
        torch.set_num_threads(threads)  # rounding depends on it, and on torch's choice of an attention kernel
        without_cudnn_attention()
        self.config = Config.model_validate_json(config)
        use_tf32(self.config.tf32)
        code_of(self.config.trainer)  # a method in a file of its own is found by name when draws arrive
        set_seed(self.config.seed)
        device = "cuda" if connected().get_gpu_ids() else "cpu"
        opened = kind_of(self.config).reopen(self.config, device, 0)
        self.policy, self.weights = opened.policy, opened.weights
        self.weights.snapshots.clear()  # draws read none: those of a copy are sent as its weights
        return versions()

    @torch.no_grad()
    def draw(self, work: Work) -> Part:
        """Draw and decode a micro-batch."""
        started, calls = time.perf_counter(), self.policy.model_calls
        if work.version != self.version:
            self.drawing, values = connected().get(work.order)
            put_back(self.weights.named, values, "the trainer")
            self.version = work.version
        sampled = self.drawing(self.policy, work.job.batch, work.job.slots, beat=lambda: None)
        finished = packed(finish(self.policy, sampled, self.config.sampling.batch_size))
        return Part(finished, self.version, self.policy.model_calls - calls, time.perf_counter() - started)


@dataclass
class Seat:
    """An actor, and what it is doing."""

    actor: Any
    awaited: Any = None
    """Reference to what it will answer; None: it has nothing to do."""
    job: Job | None = None
    """What it draws; None: it loads the pipeline, or nobody waits for its answer any more."""
    since: float = 0.0


class RayRollouts:
    """`count` actors that draw for this process. options: Ray's for each (`ray_cluster.room_for`).

    Raises ValueError where none can be started, or their versions are not those of this process.
    """

    def __init__(self, config: Config, count: int, options: Mapping[str, Any]) -> None:
        self.config, self.version, self.lost = config, 0, 0
        self._busy, self._since, self._closed = 0.0, time.perf_counter(), False
        self._ray, self._timeout_s = connected(), config.distributed.timeout_s / 2  # before the watchdog's end
        self._options = options
        self.seats = [Seat(self._actor()) for _ in range(count)]
        try:
            for versions in self._ray.get([seat.actor.versions.remote() for seat in self.seats], timeout=START_S):
                check_versions(versions)
        except self._ray.exceptions.RayError as error:
            raise ValueError(f"engine: no rollout worker could be started in {START_S:g} s: {error}") from error
        for seat in self.seats:
            self._open(seat)

    def ready(self) -> None:
        """Wait until all have loaded the pipeline."""
        self._ray.get([seat.awaited for seat in self.seats])
        for seat in self.seats:
            seat.since = time.monotonic()
        self._since = time.perf_counter()

    def order(self, draw: Draw, weights: Mapping[str, Tensor], worker: Worker) -> Order:
        """Hand the weights that draw to the actors."""
        try:
            self._ray.cloudpickle.dumps(draw)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ValueError(
                f"trainer.algorithm: how {self.config.trainer.algorithm} draws cannot be sent to rollout workers "
                f"({error}); draw by a function in the method's file (docs/extending.md), or leave engine out"
            ) from error
        with worker.timed("push"):
            self.version += 1
            sent = self._ray.put((draw, {name: value.detach().cpu() for name, value in weights.items()}))
        return Order(self.version, sent)

    def draw(self, order: Order, jobs: Iterable[Job], worker: Worker, counted: Callable[[int], None]) -> Finishing:
        """Micro-batches that the actors draw by this order, as they came (`unpacked`). counted: is told the model calls
        of each."""
        waiting, parts = deque(jobs), dict[int, Part]()
        positions, losses = [job.position for job in waiting], 0
        for seat in self.seats:
            seat.job = None  # of an iteration that was left
        # In their own order, whoever was first: sums of gradients round differently in another order.
        for position in positions:
            with worker.timed("sample"):
                while position not in parts:
                    self._hand_out(waiting, order)
                    job, part = self._hear()
                    worker.beat()
                    if isinstance(part, Exception):
                        losses += 1
                        self._check_losses(losses, part)
                        # In front: the trainer waits for the positions in order, and this one is the oldest.
                        waiting.extendleft([] if job is None else [job])
                    elif job is not None and part is not None:
                        self._check_version(part.version, order.version)
                        parts[job.position], losses = part, 0
                        self._busy += part.seconds
                        counted(part.model_calls)
                self._hand_out(waiting, order)
            yield position, parts.pop(position).finished

    def metrics(self) -> dict[str, float]:
        """Since it was asked the last time, and of the run so far."""
        now = time.perf_counter()
        idle = max(0.0, 1.0 - self._busy / (now - self._since) / len(self.seats))
        self._busy, self._since = 0.0, now
        return {"workers/idle": idle, "workers/lost": float(self.lost)}

    def close(self) -> None:
        """End the actors."""
        self._closed = True
        for seat in self.seats:
            self._ray.kill(seat.actor)

    def _actor(self) -> Any:
        return self._ray.remote(RolloutActor).options(**self._options).remote()

    def _open(self, seat: Seat) -> None:
        config = self.config.model_dump_json()
        seat.awaited = seat.actor.open.remote(config, os.getcwd(), torch.get_num_threads())
        seat.job, seat.since = None, time.monotonic()

    def _hand_out(self, waiting: deque[Job], order: Order) -> None:
        """A micro-batch for each actor that has nothing to do."""
        for seat in self.seats:
            if seat.awaited is None and waiting:
                seat.job, seat.since = waiting.popleft(), time.monotonic()
                seat.awaited = seat.actor.draw.remote(Work(order.version, order.sent, seat.job))

    def _hear(self) -> tuple[Job | None, Part | Exception | None]:
        """Wait for an actor: what it was to draw, and its answer; or why it is lost, and was replaced."""
        busy = {seat.awaited: seat for seat in self.seats if seat.awaited is not None}
        oldest = min(busy.values(), key=lambda seat: seat.since)
        left = max(0.0, oldest.since + self._timeout_s - time.monotonic())
        done, _ = self._ray.wait(list(busy), num_returns=1, timeout=left)
        seat = busy[done[0]] if done else oldest
        job, seat.job, awaited, seat.awaited = seat.job, None, seat.awaited, None
        lost: Exception = TimeoutError(f"nothing was heard of it for {self._timeout_s:g} s")
        try:
            if done:
                answer = self._ray.get(awaited)
                if isinstance(answer, dict):
                    check_versions(answer)
                return job, answer if isinstance(answer, Part) else None
        except self._ray.exceptions.RayTaskError:
            raise  # of what it did
        except self._ray.exceptions.RayError as error:
            lost = error
        if self._closed:
            raise lost
        self._ray.kill(seat.actor)
        self.lost += 1
        seat.actor = self._actor()
        if self._closed:  # since it was asked above
            self._ray.kill(seat.actor)
            raise lost
        self._open(seat)
        return job, lost

    def _check_losses(self, losses: int, last: Exception) -> None:
        if losses >= FAILURES * len(self.seats):
            raise RuntimeError(
                f"{losses} rollout workers were lost in a row, the last one since: {last}. Where they are slow to load "
                "the pipeline or to draw a micro-batch, raise distributed.timeout_s"
            ) from last

    def _check_version(self, version: int, wanted: int) -> None:
        if version != wanted:
            raise RuntimeError(f"a rollout worker drew by the weights of version {version}, not of {wanted}")


class OnDevice(NamedTuple):
    """What was on the accelerator of the process that sends it."""

    tensor: Tensor


def packed(thing: Any) -> Any:
    """Move all tensors to the CPU, and make none a view of a larger one, which would be sent whole."""

    def pack(tensor: Tensor) -> Any:
        if tensor.device.type != "cpu":
            return OnDevice(tensor.cpu())
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

    return _mapped(thing, Tensor, pack, {})


def unpacked(thing: Any, device: torch.device) -> Any:
    """The reverse of `packed`, on the device of this process."""
    return _mapped(thing, OnDevice, lambda sent: sent.tensor.to(device), {})


def _mapped(thing: Any, kind: type, change: Callable[[Any], Any], known: dict[int, tuple[Any, Any]]) -> Any:
    """Change all of this kind within, each once. known: id -> the thing, kept so that its id stays its own, and what
    became of it."""
    if isinstance(thing, kind):
        if id(thing) not in known:
            known[id(thing)] = thing, change(thing)
        return known[id(thing)][1]
    if isinstance(thing, tuple | list):
        changed = [_mapped(value, kind, change, known) for value in thing]
        return type(thing)(*changed) if hasattr(thing, "_fields") else type(thing)(changed)
    if isinstance(thing, dict):
        return {key: _mapped(value, kind, change, known) for key, value in thing.items()}
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: _mapped(getattr(thing, f.name), kind, change, known) for f in fields(thing)})
    return thing


POLL_S = 0.2
"""How long this thread sleeps without looking at signals."""


@dataclass
class Underway:
    """An iteration that the second thread draws, and the third one scores."""

    sheet: Sheet
    scoring: Scoring
    count: int
    """Micro-batches that this process has of it."""
    arrivals: SimpleQueue[tuple[int, MicroBatch]] = field(default_factory=SimpleQueue)
    """As they came (`unpacked`): they wait on the CPU."""
    beaten: Event = field(default_factory=Event)
    """Whether something was heard of the workers since it was asked last."""
    calls: int = 0
    """Model calls of what was drawn."""
    work: Future[None] | None = None


class Ahead:
    """The iterations on their way. It ends the workers that draw them when it is closed.

    device: of the samples that are taken. closing: is set where nobody waits for scores any more.
    """

    def __init__(self, far: RayRollouts, scorers: Scorers, device: torch.device, closing: Event) -> None:
        self.far, self.scorers, self.device, self.closing = far, scorers, device, closing
        self.underway: dict[int, Underway] = {}
        # One thread: iterations are drawn one after the other, each by its own weights. torch's number of threads is
        # per thread.
        self._thread = ThreadPoolExecutor(1, "drawing", torch.set_num_threads, (torch.get_num_threads(),))

    def begin(self, config: Config, sheet: Sheet, order: Order, worker: Worker) -> None:
        """Draw and score an iteration, after those that are on their way already."""
        scoring = Scoring(self.scorers, sheet.rows, sheet.group.tolist(), background=True, beat=worker.beat)
        count = len(range(worker.process, len(sheet.plan), worker.num_processes))
        underway = self.underway[sheet.iteration] = Underway(sheet, scoring.__enter__(), count)
        place = (worker.process, worker.num_processes, worker.member, worker.members)
        here = Worker(*place, beat=underway.beaten.set)  # the run is told by the thread that waits

        def counted(calls: int) -> None:
            underway.calls += calls

        finishing = self.far.draw(order, jobs_of(config, sheet, here), here, counted)

        def work() -> None:
            for item in handed_on(finishing, scoring, here):
                underway.arrivals.put(item)

        underway.work = self._thread.submit(work)

    def take(self, iteration: int, worker: Worker, *, running: Mapping[str, Running]) -> tuple[Rollouts, int]:
        """The samples of this iteration, once all are there, and the model calls that they took."""
        underway = self.underway[iteration]
        parts = self._heard(underway, worker)
        rollouts = gathered(underway.sheet, parts, underway.scoring, worker, running=running)
        del self.underway[iteration]
        underway.scoring.__exit__()
        return rollouts, underway.calls

    def close(self) -> None:
        """End the workers, and what is on its way."""
        self.closing.set()
        self.far.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        for underway in self.underway.values():
            underway.scoring.__exit__()

    def _heard(self, underway: Underway, worker: Worker) -> Iterator[tuple[int, MicroBatch]]:
        """What the second thread draws, as it comes. Raises what went wrong there."""
        assert underway.work is not None
        for _ in range(underway.count):
            with worker.timed("sample"):
                while True:
                    if underway.beaten.is_set():
                        underway.beaten.clear()
                        worker.beat()
                    try:
                        position, micro_batch = underway.arrivals.get(timeout=POLL_S)
                        break
                    except Empty:
                        # Looked at only with an empty queue: what was drawn before an error is no loss, and none is
                        # raised in place of it.
                        if underway.work.done():
                            underway.work.result()
            yield position, unpacked(micro_batch, self.device)
