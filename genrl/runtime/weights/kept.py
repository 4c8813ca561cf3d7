"""What a method keeps beside the model: a critic of its own, an optimiser, a data set. Part of every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from genrl.runtime.weights import state
from genrl.runtime.weights.sharding import load_optimizer_state


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
        packed = {name: state.pack(thing.state_dict()) for name, thing in self.things.items()}
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
