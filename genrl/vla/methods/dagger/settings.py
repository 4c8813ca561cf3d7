"""DAgger (arXiv 1011.0686): its keys, what it refuses, what it logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.vla.config.names import EXPERTS, SIMULATORS
from genrl.vla.config.schema import Row
from genrl.vla.methods.sft.settings import SFT

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


class DAgger(SFT):
    """The policy acts, the expert says what it would have done there, and all that it said is imitated."""

    title: ClassVar[str] = "DAgger"
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "dagger/labels": MetricDoc(
            "chunks that the expert has told since the run began, without the demonstrations", "The price.", "chunks"
        ),
        "dagger/beta": MetricDoc(
            "beta^i: share of the decisions of round i that the expert takes itself", "Falls to 0.", "share 0..1"
        ),
        "dagger/error": MetricDoc(
            "mean absolute difference between the policy's chunk and the expert's where the policy went; over numbers, "
            "actions and decisions of the round, before its training",
            "Falls. What stays where the success no longer rises is the policy's own size, or a hesitant expert.",
            "units of the policy, -1 to 1",
        ),
    }

    algorithm: Literal["dagger"] = "dagger"  # type: ignore[assignment]
    """Which trainer."""
    beta: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.0
    """In round i, from 1, the expert takes a decision itself with probability beta^i; 0 = never, the choice without a
    parameter (section 3.1: beta_i = I(i = 1), and the demonstrations are that round)."""

    def problems(self, config: VLAConfig) -> Iterator[Finding]:
        """Demonstrations that are missing, and simulators without an expert."""
        yield from super().problems(config)
        name = config.environment.name
        if name in SIMULATORS.built_in and name not in EXPERTS.built_in:
            text = f"dagger asks an expert, and {name} has none; {', '.join(EXPERTS.built_in)} have one"
            yield ("environment.name",), f"{text}, or a simulator of your own (docs/vla_simulators.md)"

    def plan(self, config: VLAConfig, chunk: int | None) -> list[Row]:
        """Episodes, and what sft does."""
        episodes = ("episodes", f"{config.environment.num_envs:,}", "whose decisions the expert labels")
        return [episodes, *super().plan(config, chunk)]
