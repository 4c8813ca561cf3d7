"""What a loss is made of: the batch that the policy is called with, and tensors by name. Dumps hold it as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Dumpable(Protocol):
    """A batch that can be written into a dump and made again from it."""

    def dumped(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(JSON, tensors by name)."""


@dataclass(frozen=True)
class Recorded:
    """One micro-batch: all that a method's `loss` reads besides its settings and the policy.

    graph: what sampling kept of the policy's own pass, where it is not run again (it is not dumped).
    """

    batch: Any
    """A `Dumpable`, or None where the tensors are all."""
    tensors: Mapping[str, Tensor]
    graph: Any = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def dumped(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(JSON, tensors by name): the batch's and these."""
        info, tensors = ({}, {}) if self.batch is None else self.batch.dumped()
        return info, {name: value.detach() for name, value in self.tensors.items()} | tensors
