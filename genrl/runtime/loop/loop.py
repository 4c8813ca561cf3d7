"""The one loop of all runs: iterations, phases, stopping, undoing, evaluations, checkpoints.

A `Loop` is one process of one run. It knows what is trained as one object (`Trained`) and no algorithm: a method takes
`loop.iterations()`, makes its updates by `updating.descend`, and ends each iteration by `loop.finish`.

Runs that train nothing: a warning at each iteration of this kind, and an end with the reason after some.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.utils import gather_object, set_seed

from genrl.config.sections import Optimizer
from genrl.mdp.noise import derive_seed
from genrl.runtime.folder.run import truncate_metrics
from genrl.runtime.loop import collapse, state
from genrl.runtime.loop.guards import StoppedTogether, any_rank, any_ranks
from genrl.runtime.loop.process import GlobalSettings, peak_memory_mb
from genrl.runtime.loop.state import State, Undo
from genrl.runtime.weights.optimization import Schedule

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """The process is to end, and what is running can be left without loss: an evaluation, or an iteration that has
    changed nothing or can be undone."""


class MemoryRanOut(Exception):
    """Memory ran out in one of the processes: all of them left the iteration, to do it again in smaller batches."""


@dataclass
class Loop(State):
    """One process of one training run."""

    before_iteration: Callable[[], None] | None = None
    """Called before each iteration, which it is no part of: a run in stages takes over the next one's settings."""
    ends: Collection[int] = ()
    """Numbers of finished iterations after which another method goes on (`iterations`)."""
    on_iteration: Callable[[Loop, Mapping[str, float]], None] | None = None
    """A script's, called after each iteration with what was logged of it."""
    started: float = 0.0
    """When the running iteration began."""
    global_settings: GlobalSettings = field(default_factory=GlobalSettings)
    _undo: Undo | None = None
    _evaluated: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether no iteration is left to do, or a collapse has ended the run."""
        return self.iteration >= self.config.iterations or collapse.ended(self)

    def iterations(self) -> Iterator[int]:
        """The iterations still to do of this method, 0-based; fewer where the process is asked to end, or a collapse
        ends the run."""
        collapse.resume(self)
        if self.iteration == 0 and not self._evaluated:
            # The model before training, which the last evaluation is compared with.
            figures = self._evaluate()
            if figures:
                self.process.log.log(0, figures)
            self._evaluated = True
            if collapse.to_be_saved(self):
                self.save()
        # A run that was stopped within an evaluation saved before it: the row that waited for it is written now.
        if self.unfinished_row is not None:
            row = self.unfinished_row | (self._evaluate() if self.evaluates_at(self.iteration) else {})
            if self.is_main:  # a run that was stopped again since has written this row before
                truncate_metrics(self.process.run.metrics, self.iteration - 1)
            self.process.log.log(self.iteration, row)
            self.unfinished_row = None
            self.outdated = True
            if collapse.to_be_saved(self):
                self.save()
        if self.iteration in self.ends:
            collapse.forget_histories(self)
        while not self.is_complete and not any_rank(self.process.stop.requested, self.process.accelerator):
            if self.before_iteration is not None:
                self.before_iteration()
            self.timings.clear()
            self.started = time.perf_counter()
            self.optimization.iteration = self.iteration
            self.optimization.updates = self.optimization.other_updates = 0
            self._seed_globals("iteration")
            # Before anything is drawn: what drawing changes (counters of questions, histories) is to be undone, too.
            self._undo = Undo.of(self)
            self.process.progress.begin_iteration()
            yield self.iteration
            if self.iteration in self.ends:
                return

    def reschedule(self, settings: Optimizer, first: int, iterations: int) -> None:
        """Make the learning rate from here on that of a run of its own, which begins after `first` iterations and has
        so many. Where it is just beginning, the optimiser forgets what it has averaged; so does a copy in float32 what
        is too small to show in half precision."""
        rates = {group["name"]: settings.lr for group in self.optimizer.param_groups}
        self.schedule = Schedule(settings, rates, iterations, first=first)
        self.optimization.schedule = self.schedule
        if self.iteration == first:
            self.optimizer.state.clear()
            for group in self.optimizer.param_groups:
                group["steps"] = 0

    def _seed_globals(self, phase: str) -> None:
        """Nothing here draws from the global generators, but a user's reward, simulator or pipeline may: they start
        from the same numbers whether the run was stopped before or not."""
        self.global_settings.put_back()
        # numpy takes seeds of 32 bits.
        set_seed(derive_seed(self.config.seed, phase, self.iteration, self.process.replica) % 2**32)

    def phase(self, name: str, total: int = 0, parts: int = 0) -> None:
        """A phase begins, with so much to do, in so many equal parts where it has some."""
        self.global_settings.put_back()
        self.process.progress.phase(name, total, parts)
        self.process.watchdog.beat(name, self.iteration)

    def advance(self, count: float) -> None:
        """So much of the running phase is done."""
        self.process.progress.advance(count)
        self.alive()

    def alive(self) -> None:
        """Tell the watchdog that something was done."""
        self.process.watchdog.beat(self.process.progress.name, self.iteration)

    def advance_or_leave(self, count: float) -> None:
        """`advance`; a process that is alone then leaves if it is asked to. Several must leave together, which costs a
        word to each other: they do so where all call `check_stop`."""
        self.advance(count)
        if self.process.accelerator.num_processes == 1:
            self.check_stop()

    def check_stop(self, *, out_of_memory: bool = False) -> None:
        """Leave the iteration here where it must be: raise MemoryRanOut in all processes where memory ran out in one,
        Interrupted where one was asked to end. All processes call it at the same place."""
        if not self.can_be_left:
            return
        # Both are asked in one exchange: processes that asked different questions would wait for each other for ever.
        short, stops = any_ranks([out_of_memory, self.process.stop.requested], self.process.accelerator)
        if short:
            raise MemoryRanOut
        if stops:
            raise Interrupted

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Leave the iteration for smaller micro-batches where memory runs out within the block, if the run retries and
        it can be left. The other processes hear of it where they next ask (`check_stop`), which must be the next thing
        they ask each other."""
        try:
            yield
        except torch.OutOfMemoryError:
            if self.retries:
                self.check_stop(out_of_memory=True)
            raise

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.timings[phase] = self.timings.get(phase, 0.0) + time.perf_counter() - started

    @property
    def can_be_left(self) -> bool:
        """Whether the running iteration has changed nothing, or can be undone."""
        changed = self.optimization.updates or self.optimization.other_updates
        return not changed or (self._undo is not None and self._undo.complete)

    def undo(self) -> None:
        """Put back what the running iteration, which was left, has changed."""
        if self._undo is not None:
            self._undo.apply(self)
            self._undo = None
        self.trained.forget()

    def finish(self, metrics: Mapping[str, float]) -> None:
        """End of an iteration: log, and, where due, evaluate and save."""
        # Before anything is written: a folder that was removed would be made anew, with half of a run in it.
        self.process.check_folder()
        # Figures after n finished iterations have the number n, as checkpoints do: 0 is the model before training.
        self.iteration += 1
        self._undo = None
        elapsed, last = time.perf_counter() - self.started, self.iteration == self.config.iterations
        row = dict(metrics) | {
            **self.optimization.figures(),
            # The fullest process decides whether a run fits.
            "memory/peak_mb": max(gather_object([peak_memory_mb(self.process.accelerator.device)])),
        }
        _note_idle(self, row)
        row |= collapse.note(self, row)
        # Evaluation and saving change nothing: from here on the process may leave without undoing the iteration.
        self.optimization.updates = self.optimization.other_updates = 0
        self.unfinished_row = row | _timing_row(self, elapsed)  # until it is written
        if self.evaluates_at(self.iteration):
            try:
                row |= self._evaluate()
            except Interrupted:  # saving comes first, the row is written with its evaluation on resume
                return self.save()
        self.process.log.log(self.iteration, row | _timing_row(self, elapsed))
        self.unfinished_row = None
        self.process.progress.finish_iteration(self.iteration, row)
        _check_idle(self, row)
        if self.on_iteration is not None:
            self._tell({"step": self.iteration} | row | _timing_row(self, elapsed))
        if self.iteration % self.config.checkpoint.every == 0 or last or collapse.to_be_saved(self):
            self.save()

    def evaluates_at(self, iteration: int) -> bool:
        """Whether an evaluation follows so many iterations. One does before an idle run is given up, too, where it may
        go back to its best instead."""
        every = self.config.evaluation.every
        gives_up = self.config.evaluation.on_collapse == "back" and collapse.is_idle(self)
        return bool(every and (iteration % every == 0 or iteration == self.config.iterations or gives_up))

    def _tell(self, row: Mapping[str, float]) -> None:
        """Call the script's function; an interruption that it raises, or that meets it, ends training."""
        assert self.on_iteration is not None
        try:
            self.on_iteration(self, row)
        except KeyboardInterrupt:
            self.process.stop.signal = signal.SIGINT

    def _evaluate(self) -> dict[str, float]:
        if not self.config.evaluation.every:
            return {}
        self._seed_globals("evaluation")
        with self.timed("eval"), self.averaged():
            figures = self.trained.evaluate(self.iteration)
        return figures | collapse.watch(self, figures) if figures else figures

    def save(self) -> None:
        """Write a checkpoint of this moment: between two iterations, all that decides the rest of the run."""
        state.save(self)

    def restore(self, path: Path) -> None:
        """Go back to the moment of a checkpoint that was verified. Raises ValueError where it is another model's."""
        state.restore(self, path)


def _timing_row(loop: Loop, elapsed: float) -> dict[str, float]:
    return {f"timing/{phase}_s": s for phase, s in loop.timings.items()} | {"timing/iteration_s": elapsed}


def _note_idle(loop: State, row: Mapping[str, float]) -> None:
    """Count the iteration that ends, before its updates are forgotten."""
    stepped = loop.optimization.updates or loop.optimization.other_updates
    # A step along a gradient of 0 moves weights by decay and momentum alone.
    still = not stepped or row.get("grad_norm") == 0.0
    if loop.is_main and (still or math.isnan(row.get("reward/total_mean", 0.0))):
        logger.warning("iteration %d taught nothing: %s", loop.iteration, _idle_reason(row))
    if stepped:
        loop.memory.pop(collapse.IDLE, None)
    else:
        loop.memory[collapse.IDLE] = loop.memory.get(collapse.IDLE, 0) + 1


def _check_idle(loop: State, row: Mapping[str, float]) -> None:
    """Raise StoppedTogether after `idle_iterations` of them."""
    if collapse.is_idle(loop):
        raise StoppedTogether(
            f"stopped: the last {loop.memory[collapse.IDLE]} iterations changed no weight: {_idle_reason(row)}. Where "
            f"that may happen for a while (rare success, a critic that is trained elsewhere), go on by `genrl resume "
            f"{loop.process.run.folder} idle_iterations=null`, or with a larger number."
        )


def _idle_reason(row: Mapping[str, float]) -> str:
    """Why nothing was learnt, as far as the figures of an iteration tell."""
    failed = [
        name.removeprefix("reward/").removesuffix("_failed")
        for name, n in row.items()
        if name.endswith("_failed") and n
    ]
    if math.isnan(row.get("reward/total_mean", 0.0)):
        return f"no sample had a score; {', '.join(failed) or 'a reward'} gave none, and the log says why"
    if row.get("zero_std_ratio") == 1.0:
        some = f", and {', '.join(failed)} gave some no score" if failed else ""
        same = f"in every group all samples have the same reward (zero_std_ratio 1){some}"
        return f"{same}; try easier or harder prompts, or larger groups"
    if not row.get("updates", 1.0):
        return "its method made no optimiser step"
    if row.get("grad_norm") == 0.0:
        return "the gradient was 0"
    return "look at the metrics of advantages, loss and gradient"
