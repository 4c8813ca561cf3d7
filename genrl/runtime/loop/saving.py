"""Saving a loop between two iterations and going back to it, and saving what is finished where an error ends a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import write_atomic
from genrl.runtime.loop.guards import NonFiniteError, any_rank, non_finite
from genrl.runtime.loop.state import State
from genrl.runtime.weights import state
from genrl.runtime.weights.sharding import load_optimizer_state, local

logger = logging.getLogger(__name__)


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
            f"last update overflowed. `genrl resume {loop.process.run.folder}` goes on from the last checkpoint; if it "
            "comes to the same end, start again with a lower optimizer.lr, or in bfloat16 or float32.",
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
