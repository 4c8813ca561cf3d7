"""GRPO over groups of episodes: its keys, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.vla.methods.settings import Update, from_a_loaded_policy

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


class GRPO(Update):
    """GRPO over groups of episodes that begin in the same state: no critic."""

    title: ClassVar[str] = "GRPO of policies in simulation"

    algorithm: Literal["grpo"] = "grpo"
    """Which trainer."""

    def problems(self, config: VLAConfig) -> Iterator[Finding]:
        """Problems beside those of the surrogate: groups of one episode."""
        yield from from_a_loaded_policy(config, self.algorithm)
        yield from super().problems(config)
        if config.environment.group_size < 2:
            text = "grpo compares the episodes of a group; write 2 or more (8 is usual)"
            yield ("environment.group_size",), text
