"""Supervised training on demonstrations: its keys, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.section import Count
from genrl.vla.config.schema import Row, VLAMethod
from genrl.vla.methods.settings import from_demonstrations

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


class SFT(VLAMethod):
    """Supervised training on demonstrations: flow matching, noise prediction, or the policy's own loss."""

    title: ClassVar[str] = "Supervised training of policies in simulation"
    imitates = "always"
    trains: ClassVar[tuple[str, ...]] = ("velocity", "noise", "tokens", "actions")

    algorithm: Literal["sft"] = "sft"
    """Which trainer."""
    steps_per_iteration: Count = 50
    """Optimiser steps of one iteration."""
    batch_size: Count = 128
    """Frames per optimiser step, over all processes."""

    @property
    def rows_per_pass(self) -> int:
        return self.batch_size

    def problems(self, config: VLAConfig) -> Iterator[Finding]:
        """Demonstrations that are missing."""
        return from_demonstrations(config, self.algorithm)

    def plan(self, config: VLAConfig, chunk: int | None) -> list[Row]:
        """Optimiser steps and their frames."""
        return [("optimiser steps", f"{self.steps_per_iteration:,}", f"of {self.batch_size} frames")]
