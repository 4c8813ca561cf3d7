"""What a loop knows of its run at a moment: the weights, their optimiser, and what is kept between iterations.

What a method keeps beside the model: a critic of its own, an optimiser, a data set. Part of every checkpoint.

Saving a loop between two iterations and going back to it, and saving what is finished where an error ends a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from genrl.config.errors import command
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import write_atomic
from genrl.runtime.loop.guards import NonFiniteError, any_rank, non_finite
from genrl.runtime.loop.process import Process
from genrl.runtime.weights import state
from genrl.runtime.weights.optimization import Optimization, Schedule
from genrl.runtime.weights.sharding import load_optimizer_state, local
from genrl.runtime.weights.weights import AVERAGE, Weights

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """Its state must be the same in all processes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass
class Kept:
    """All that is kept, by name."""

    things: dict[str, Stateful] = field(default_factory=dict)
    unchanging: set[str] = field(default_factory=set)
    """Names of those that no iteration changes."""
    restored: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States from a checkpoint of what is not kept yet."""

    @property
    def changing(self) -> dict[str, Stateful]:
        """Things that iterations change."""
        return {name: thing for name, thing in self.things.items() if name not in self.unchanging}

    def knows(self, name: str) -> bool:
        """Whether what is kept under this name gets a state that there was before: of a checkpoint, or of one kept."""
        return name in self.restored or name in self.things

    def keep(self, name: str, thing: Stateful, *, changes: bool) -> None:
        """Keep it from here on. It gets the state that was restored under its name, or that of the one before it."""
        before = self.things.get(name)
        self.things[name] = thing
        if not changes:
            self.unchanging.add(name)
        # A method makes its parts when it starts, which is after the checkpoint was read: their states wait for them
        # here.
        if name in self.restored:
            _load(thing, self.restored.pop(name))
        elif before is not None and before is not thing:
            thing.load_state_dict(before.state_dict())

    def pack(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """(tensors, by file of a checkpoint; the rest, by name, as JSON)."""
        # A stage that was resumed may end before the method whose things they are begins again.
        states = self.restored | {name: thing.state_dict() for name, thing in self.things.items()}
        packed = {name: state.pack(tree) for name, tree in states.items()}
        return {f"kept-{n}": tensors for n, (tensors, _) in packed.items()}, {
            n: tree for n, (_, tree) in packed.items()
        }

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], trees: Mapping[str, Any]) -> None:
        """What `pack` gave, for those that are kept from here on."""
        self.restored = {name: state.unpack(tensors.get(f"kept-{name}", {}), tree) for name, tree in trees.items()}

    def put_back(self, tensors: Mapping[str, Mapping[str, Tensor]], trees: Mapping[str, Any]) -> None:
        """What iterations change gets the state that `pack` gave once."""
        for name, thing in self.changing.items():
            if name in trees:
                _load(thing, state.unpack(tensors.get(f"kept-{name}", {}), trees[name]))


def _load(thing: Stateful, tree: dict[str, Any]) -> None:
    if isinstance(thing, Optimizer):
        load_optimizer_state(thing, tree)
    else:
        thing.load_state_dict(tree)


class Trained(Protocol):
    """What of a run the loop calls: `TrainingRun` has these, and says what they do."""

    def evaluate(self, iteration: int) -> dict[str, float]: ...
    def export(self, folder: Path | None) -> None: ...
    def micro_batch_sizes(self) -> list[int]: ...
    def resize(self, size: int) -> None: ...
    def forget(self) -> None: ...


@dataclass
class State:
    """One process of one training run, between or within its iterations."""

    config: Any
    process: Process
    weights: Weights
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    trained: Trained
    retries: bool = False
    """Whether an iteration in which memory runs out is done again."""
    after_backward: Callable[[], None] | None = None
    iteration: int = 0
    """Finished iterations."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds per phase of the running iteration."""
    unfinished_row: dict[str, float] | None = None
    """Metrics of the last iteration where its evaluation was left; kept in the checkpoint."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What a method keeps from one iteration to the next, as JSON; in the checkpoint."""
    kept: Kept = field(default_factory=Kept)
    """Beside the model (`keep`)."""
    outdated: bool = False  # the checkpoint of this iteration: its evaluation, which may roll back, came after it
    saved: int | None = None  # the iteration of the newest checkpoint

    def __post_init__(self) -> None:
        average = self.config.ema
        self.optimization = Optimization(
            self.process.accelerator, self.weights, self.optimizer, self.schedule, self.process.run.dumps, average
        )
        if average is not None and AVERAGE not in self.weights.snapshots:
            self.weights.snapshot(AVERAGE)

    @property
    def is_main(self) -> bool:
        return self.process.is_main

    @property
    def updates(self) -> int:
        """Optimiser steps of the running iteration that moved the weights."""
        return self.optimization.updates

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the run so far."""
        return self.optimization.steps

    @property
    def lr(self) -> float:
        """Learning rate of the last step of the first group of parameters."""
        return float(self.optimizer.param_groups[0]["lr"])

    def keep(self, name: str, thing: Stateful, *, changes: bool = True) -> None:
        """Save it with every checkpoint from here on; in a resumed run it gets back the state that was saved, and where
        the method is begun again in this process, that of the one kept under this name before. changes: whether
        iterations change it, so that undoing one puts it back; False for data that is made once.
        """
        self.kept.keep(name, thing, changes=changes)

    def keep_average(self) -> None:
        """Let the model hold the averaged weights from here on, where the run keeps an average: it is trained no
        more."""
        if self.config.ema is not None:
            self.weights.take(AVERAGE)

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the model holds the averaged weights, where the run keeps an average."""
        return self.weights.use(AVERAGE) if self.config.ema is not None else nullcontext()


@dataclass(frozen=True)
class _Copies:
    weights: dict[str, Tensor]
    snapshots: dict[str, dict[str, Tensor]]
    optimizer: dict[str, Any]


@dataclass(frozen=True)
class Undo:
    """The beginning of an iteration. Without copies of weights that are too large (`Weights.can_be_copied`) it can be
    applied only before the first update."""

    memory: dict[str, Any]
    kept: dict[str, dict[str, Any]]
    optimizer_steps: int
    copies: _Copies | None

    @property
    def complete(self) -> bool:
        """Whether an iteration can be left after an update."""
        return self.copies is not None

    @classmethod
    def of(cls, loop: State) -> Self:
        """Copy of the loop's state as it is now."""
        copies = None
        if loop.weights.can_be_copied:
            copies = _Copies(
                {key: p.detach().clone() for key, p in loop.weights.named.items()},
                {name: {k: t.clone() for k, t in held.items()} for name, held in loop.weights.snapshots.items()},
                state.copied(loop.optimizer.state_dict()),
            )
        # Methods replace what stands under a key of a dictionary in memory, they never change it: histories of
        # thousands of prompts need not be copied.
        memory = {
            key: dict(value) if isinstance(value, dict) else deepcopy(value) for key, value in loop.memory.items()
        }
        changing = loop.kept.changing if copies else {}
        states = {name: state.copied(thing.state_dict()) for name, thing in changing.items()}
        return cls(memory, states, loop.optimizer_steps, copies)

    def apply(self, loop: State) -> None:
        """Put it back."""
        loop.memory, loop.optimization.steps = self.memory, self.optimizer_steps
        for name, saved in self.kept.items():
            loop.kept.things[name].load_state_dict(saved)
        if self.copies is not None:
            for key, parameter in loop.weights.named.items():
                # In place: the optimiser, shards and recorded graphs hold these very tensors.
                parameter.data.copy_(self.copies.weights[key])
            loop.weights.snapshots = self.copies.snapshots
            loop.optimizer.load_state_dict(self.copies.optimizer)
        loop.optimization.updates = loop.optimization.other_updates = 0
        # They are of micro-batches that are cut anew.
        loop.optimization.suspects.clear()


def save(loop: State) -> None:
    """Write a checkpoint of this moment, unless there is one: all that decides the rest of the run. All processes.

    Raises NonFiniteError, in all processes, where a trained weight is NaN or infinite: a resume would be stuck on it.
    """
    if loop.saved == loop.iteration and not loop.outdated:
        return
    process = loop.process
    process.watchdog.beat("saving", loop.iteration)
    # A folder that was given to another run meanwhile must not get this one's weights.
    process.check_folder()
    weights = loop.weights.state()
    _require_finite(loop, weights)
    optimizer, packed = state.pack(loop.optimizer.state_dict())
    kept_tensors, kept_trees = loop.kept.pack()
    tensors = weights | {"optimizer": optimizer} | kept_tensors
    if loop.is_main:
        checkpoint.save(
            process.run.checkpoints,
            loop.iteration,
            tensors=tensors,
            state={
                "optimizer_steps": loop.optimizer_steps,
                "optimizer": packed,
                "unfinished_row": loop.unfinished_row,
                "memory": loop.memory,
                "kept": kept_trees,
            },
            keep=loop.config.checkpoint.keep,
            spared=loop.memory.get("collapse", {}).get("best"),
            extra=partial(_write_beside, loop),
            replace=loop.outdated,
        )
    else:
        checkpoint.save_shares(tensors)
        # A sharded model is gathered by all: the main process cannot write it without these passes.
        loop.trained.export(None)
    loop.saved, loop.outdated = loop.iteration, False
    # Nobody goes on before the checkpoint is there: what is changed next would go into it.
    process.accelerator.wait_for_everyone()
    process.watchdog.beat("saving", loop.iteration)


def _require_finite(loop: State, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
    named = {f"{stem}/{name}": local(tensor) for stem, tensors in weights.items() for name, tensor in tensors.items()}
    bad = non_finite(named)
    if any_rank(bool(bad), loop.process.accelerator):
        which = f"{len(bad)} of {len(named)} tensors, e.g. {bad[0]}" if bad else "those of another process"
        raise NonFiniteError(
            f"trained weights are not finite after iteration {loop.iteration} ({which}), so they were not saved: the "
            f"last update overflowed. `{command('resume', loop.process.run.folder)}` goes on from the last checkpoint; "
            "if it comes to the same end, start again with a lower optimizer.lr, or in bfloat16 or float32.",
            None,
        )


def _write_beside(loop: State, folder: Path) -> None:
    """What a checkpoint has beside its tensors: the model, and the configuration that this process trains by, by which
    a resume is judged. The file in the run folder may have been edited since."""
    if loop.process.config:
        write_atomic(folder / "config.yaml", loop.process.config)
    loop.trained.export(folder)


def restore(loop: State, path: Path) -> None:
    """Go back to the moment of a checkpoint that was verified. Raises ValueError where it is another model's."""
    # Its files were verified when it was chosen (`checkpoint.to_resume`): hashing them again would double the start.
    loaded = checkpoint.load(path, in_shares=True, hashes=False)
    _fill(loop, loaded)
    loop.optimization.steps, loop.iteration = loaded.state["optimizer_steps"], loaded.step
    loop.saved = loaded.step
    loop.unfinished_row, loop.memory = loaded.state["unfinished_row"], loaded.state["memory"]
    loop.kept.restore(loaded.tensors, loaded.state["kept"])
    # Memory ran out at the larger size before; a resumed run would only find out again.
    if loop.retries and "batch_size" in loop.memory:
        loop.trained.resize(loop.memory["batch_size"])


def _fill(loop: State, loaded: checkpoint.Loaded) -> None:
    loop.weights.restore(loaded.tensors)
    load_optimizer_state(loop.optimizer, state.unpack(loaded.tensors["optimizer"], loaded.state["optimizer"]))


def go_back(loop: State, step: int) -> dict[str, Any]:
    """What is trained, its optimiser and what is kept beside it become those of a checkpoint of this run, while the
    iterations, and what methods remember of them, go on. Returns what was remembered then."""
    loaded = checkpoint.load(checkpoint.of_step(loop.process.run.checkpoints, step), in_shares=True)
    _fill(loop, loaded)
    loop.kept.put_back(loaded.tensors, loaded.state["kept"])
    return dict(loaded.state["memory"])
