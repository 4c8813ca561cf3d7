"""What an iteration changes, as it was at its beginning: so that one that is left can be done again."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from genrl.runtime.loop.state import State
from genrl.runtime.weights import state


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
