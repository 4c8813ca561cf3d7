"""MusicRL (arXiv 2402.04229): REINFORCE of audio tokens with a value for every token and a KL over all codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Share
from genrl.vlm.config.schema import VLMMethod

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig


class MusicRL(VLMMethod):
    """MusicRL: REINFORCE of audio tokens with a value for every token and a KL over all codes. One update an
    iteration."""

    title: ClassVar[str] = "MusicRL"
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "grad_norm/baseline": MetricDoc(
            "norm of the gradient of MusicRL's value function, before clipping", "As `grad_norm`."
        ),
    }

    algorithm: Literal["music_rl"] = "music_rl"
    """Which method."""
    alpha: Share = 0.05
    """Share of the KL in the loss; the rest is the policy's."""
    micro_batch: Count | None = None
    """Answers per pass of the model, to save memory; null = all of the update."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"ref", "heads"})

    @property
    def rows_per_pass(self) -> int | None:
        return self.micro_batch

    def problems(self, config: VLMConfig) -> Iterator[Finding]:
        if config.vlm.output not in ("audio", "music"):
            text = "music_rl is of models whose output is music or audio; write it, or algorithm: answers"
            yield ("trainer.algorithm", "vlm.output"), text
