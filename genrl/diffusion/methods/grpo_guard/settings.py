"""GRPO-Guard: ratios alike at all steps, losses divided by the step (arXiv 2510.22319)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.section import Positive
from genrl.diffusion.steps.layout import Round
from genrl.diffusion.steps.settings import Windowed

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config


class GRPOGuard(Windowed):
    """GRPO-Guard (arXiv 2510.22319): ratios centred and scaled alike at all steps, losses divided by the step."""

    title: ClassVar[str] = "GRPO-Guard"
    takes = frozenset({"recorded_calls", "older_samples", "part_of_groups"})

    algorithm: Literal["grpo_guard"] = "grpo_guard"
    """Which trainer."""
    clip_range: Positive | tuple[Positive, Positive] = 4e-6
    """Ratio kept in 1 - low .. 1 + high: one distance or [low, high], both positive (GRPO-Guard: 2e-6 to 4e-6 at
    65,536 numbers in a latent)."""

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        if self.kernel == "ddim":
            text = "GRPO-Guard divides by the step in sigma, and ddim's are alpha-bars; use a flow model's kernel"
            yield ("trainer.kernel", "trainer.algorithm"), text

    def further_replays(self, config: Config, rounds: Sequence[Round], replayed: float) -> float:
        """The means before the first update, of the samples that it does not train on."""
        return replayed * (1 - 1 / self.updates)
