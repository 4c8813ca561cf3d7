"""The base of the runs of all kinds: what is trained, the weights that draw, and the loop that trains.

Samples of coming iterations, which a second thread waits for while an iteration is trained (`versions`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from threading import Event
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from genrl.runtime.loop.loop import Loop
from genrl.runtime.loop.process import Process
from genrl.runtime.show import sheet
from genrl.runtime.weights.optimization import Schedule
from genrl.runtime.weights.optimizers import make_optimizer
from genrl.runtime.weights.weights import Weights

T = TypeVar("T")
Advance = Callable[[int], None]
"""Is told that so much more is done."""

POLL_S = 0.2
"""How long the run's own thread sleeps without looking at signals."""


class Closed(Exception):
    """Nobody waits for samples any more."""


@dataclass
class Underway(Generic[T]):
    """An iteration on its way: how much of it is done, and its samples."""

    done: int = 0
    work: Future[T] | None = None


class Ahead(Generic[T]):
    """The iterations on their way, one after the other in the order they were begun."""

    def __init__(self) -> None:
        self.underway: dict[int, Underway[T]] = {}
        self._closing = Event()
        # One thread: iterations come in their order, and each may need what the one before has left. torch counts its
        # own threads by thread, and a new one would begin with all processors.
        self._thread = ThreadPoolExecutor(1, "ahead", torch.set_num_threads, (torch.get_num_threads(),))

    def begin(self, iteration: int, work: Callable[[Advance], T]) -> None:
        """Let the samples of an iteration be made by `work`, which is given whom to tell of its progress."""
        underway = self.underway[iteration] = Underway()

        def advance(count: int) -> None:
            if self._closing.is_set():
                raise Closed
            underway.done += count

        underway.work = self._thread.submit(work, advance)

    def take(self, iteration: int, advance: Advance) -> T:
        """Wait for its samples. advance: is told in this thread. Raises what the work raised, and Closed where another
        thread closes this."""
        underway, reported = self.underway[iteration], 0
        assert underway.work is not None
        # Waking now and then, for the progress that the other thread only notes: bars and watchdogs belong to this one.
        while not wait([underway.work], timeout=POLL_S).done:
            if self._closing.is_set():
                raise Closed
            if (done := underway.done) > reported:
                advance(done - reported)
                reported = done
        # Before `result`, which may raise: an iteration that failed is not to be found on its way.
        del self.underway[iteration]
        return underway.work.result()

    def close(self) -> None:
        """End what is on its way, where it next tells of its progress."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)


C = TypeVar("C")
Groups = Mapping[str, tuple[Sequence[nn.Parameter], float]]
"""Name -> trained parameters, which are stepped together, and their learning rate."""


class Versions:
    """The weights that draw, after each of the last iterations; on the CPU: bounded staleness.

    Iteration i is drawn by the weights after i - staleness iterations, the first ones by those before training: always
    by these and by no others, whoever is slow. So a run is reproducible to the bit, wherever it was stopped; a
    checkpoint holds the weights that still draw, and a resumed run draws anew what was on its way.
    """

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self.weights: dict[int, dict[str, Tensor]] = {}
        """Number of finished iterations -> weights by name."""

    def age(self, iteration: int) -> int:
        """How many iterations the weights were behind that drew this one."""
        return min(iteration, self.staleness)

    def of(self, iteration: int) -> dict[str, Tensor]:
        """The weights that draw this iteration."""
        return self.weights[iteration - self.age(iteration)]

    def drawing(self, weights: Weights, iteration: int) -> AbstractContextManager[None]:
        """Context in which the model has the weights that draw this iteration, where these are not the present ones."""
        return weights.lent(self.of(iteration)) if self.age(iteration) else nullcontext()

    def note(self, iteration: int, weights: Mapping[str, Tensor]) -> None:
        """Note the weights after so many iterations."""
        # On the CPU: one set for each iteration of staleness, beside the weights that train, would not fit on the
        # device. A copy also where they are there already: training goes on writing into them.
        self.weights[iteration] = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
        for old in [number for number in self.weights if number < iteration - self.staleness]:
            del self.weights[old]

    def state_dict(self) -> dict[str, Any]:
        return {str(number): named for number, named in self.weights.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = {int(number): dict(named) for number, named in state.items()}


class TrainingRun(ABC, Generic[C]):
    """One process of one run: what the frame opens, and what methods train with.

    staleness: how many iterations the weights that draw are behind the present ones. retries: whether an iteration in
    which memory runs out is done again. steps: as of `Schedule`. ends, before_iteration: as of `Loop`.
    """

    def __init__(
        self,
        config: C,
        process: Process,
        policy: Any,
        weights: Weights,
        groups: Groups,
        *,
        staleness: int = 0,
        retries: bool = False,
        steps: int | None = None,
        ends: Collection[int] = (),
        before_iteration: Callable[[], None] | None = None,
    ) -> None:
        self.process, self.policy = process, policy
        self.versions = Versions(staleness) if staleness else None
        how: Any = config
        parameters = [{"name": name, "params": list(group)} for name, (group, _) in groups.items()]
        rates = {name: rate for name, (_, rate) in groups.items()}
        optimizer = make_optimizer(parameters, how.optimizer)
        schedule = Schedule(how.optimizer, rates, how.iterations, steps)
        self.loop = Loop(
            config, process, weights, optimizer, schedule, self,
            retries=retries, before_iteration=before_iteration, ends=ends,
        )  # fmt: skip

    @property
    def config(self) -> C:
        """The configuration by which the running iteration goes."""
        config: C = self.loop.config
        return config

    @property
    def settings(self) -> Any:
        """Settings of the method that trains."""
        return self.loop.config.trainer

    @property
    def weights(self) -> Weights:
        """The trained parameters and their snapshots."""
        return self.loop.weights

    @property
    def accelerator(self) -> Accelerator:
        return self.process.accelerator

    @property
    def is_main(self) -> bool:
        return self.process.is_main

    @property
    def iteration(self) -> int:
        """Finished iterations: the number of the running one."""
        return self.loop.iteration

    @property
    def age(self) -> int:
        """How many iterations the weights are behind that draw the running one."""
        return 0 if self.versions is None else self.versions.age(self.iteration)

    @property
    def aged(self) -> dict[str, float]:
        """The metric of the age, where there is a choice of one."""
        return {} if self.versions is None else {"staleness": float(self.age)}

    def drawing(self) -> AbstractContextManager[None]:
        """Context with the weights that draw the running iteration, where these are older than the present ones."""
        return nullcontext() if self.versions is None else self.versions.drawing(self.weights, self.iteration)

    def note_weights(self) -> None:
        """The present weights draw an iteration to come, where the run draws by older ones."""
        if self.versions is not None:
            self.versions.note(self.iteration, self.weights.named)

    def coming(self) -> range:
        """The iterations, from the running one on, whose weights are there: they can be drawn now."""
        assert self.versions is not None
        last: int = min(self.iteration + self.versions.staleness, self.loop.config.iterations - 1)
        return range(self.iteration, last + 1)

    def begin(self, last_checkpoint: Path | None) -> None:
        """Before the first iteration of this process, after its last checkpoint, where it has one, was restored."""
        if self.versions is not None:
            self.loop.keep("drawing", self.versions, changes=False)  # an iteration that is done again notes the same

    @abstractmethod
    def look(self) -> sheet.ContactSheet:
        """A few samples, drawn and scored for a person to look at; in one process, before anything is trained."""

    def note_sheet(self, make: Callable[[], sheet.ContactSheet]) -> None:
        """The report opens with what this makes, of what the first iteration showed anyway."""
        # Of the first iteration alone, which every run has: making a sheet decodes and draws, which later ones need not
        # pay for.
        if self.is_main and self.iteration == 0:
            sheet.save(make(), self.process.run.samples / sheet.NAME)

    @abstractmethod
    def evaluate(self, iteration: int) -> dict[str, float]:
        """Metrics after so many iterations, the same in all processes; writes pictures. Empty without anything to
        evaluate on."""

    def export(self, folder: Path | None) -> None:
        """Write the model in its users' format into the folder of a checkpoint, where such a copy is kept; nothing
        here: checkpoints hold the trained weights alone. folder: None in processes that write nothing, and only make
        those passes with the main one that all make together."""

    @abstractmethod
    def micro_batch_sizes(self) -> list[int]:
        """The present size of micro-batches and the smaller ones that can be taken; one where it cannot shrink."""

    @abstractmethod
    def resize(self, size: int) -> None:
        """Give micro-batches this size from here on."""

    def forget(self) -> None:
        """Let go of the samples of the running iteration, which is undone."""

    def hand_over(self) -> Any:
        """What was trained, its average where there is one, for use without this run, which ends."""
        self.loop.keep_average()
        return self.policy

    @abstractmethod
    def conclude(self) -> None:
        """The end of a run, complete or not, in the main process: its files, report, and where they are."""


class Joinable(Protocol):
    """A part of what was judged, which can be put together with the next process's."""

    def joined(self, other: Self, /) -> Self: ...


J = TypeVar("J", bound=Joinable)


def of_all(own: J) -> J:
    """What all processes have judged, in their order."""
    every: list[J] = gather_object([own])
    return reduce(lambda whole, part: whole.joined(part), every)


def filled(table: Tensor, mine: Sequence[tuple[int, list[int], Tensor]]) -> Tensor:
    """`table` [T, N] filled in with (step, slots, values [B]) of all processes; the same in all of them."""
    for i, slots, values in gather_object([(i, slots, values.detach().cpu()) for i, slots, values in mine]):
        table[i, slots] = values.to(table.dtype)
    return table
