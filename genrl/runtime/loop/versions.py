"""The weights of the last iterations, by which later ones are drawn: bounded staleness.

Iteration i is drawn by the weights after i - staleness iterations, the first ones by those before training: always by
these and by no others, whoever is slow. So a run is reproducible to the bit, wherever it was stopped; a checkpoint
holds the weights that still draw, and a resumed run draws anew what was on its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from genrl.runtime.weights.weights import Weights


class Versions:
    """The weights that draw, after each of the last iterations; on the CPU."""

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
        """These are the weights after so many iterations."""
        self.weights[iteration] = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
        for old in [number for number in self.weights if number < iteration - self.staleness]:
            del self.weights[old]

    def state_dict(self) -> dict[str, Any]:
        return {str(number): named for number, named in self.weights.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = {int(number): dict(named) for number, named in state.items()}
