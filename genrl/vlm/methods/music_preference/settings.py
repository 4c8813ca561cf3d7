"""The reward model of MusicRL-U (arXiv 2402.04229): a MusicGen with a score, learnt from pairs of pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count
from genrl.vlm.config.schema import Row, Shared, VLMMethod

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig


class MusicPreference(VLMMethod):
    """MusicRL-U's reward model: Bradley-Terry on pairs of pieces to a text, of which one was preferred."""

    learns_from = "data"
    title: ClassVar[str] = "MusicRL's reward model"
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "pairs/accuracy": MetricDoc(
            "share of an iteration's pairs whose preferred piece has the higher score, a tie being half; of held-out "
            "pairs it is `eval/accuracy_mean`",
            ".5: nothing is learnt. Far above the held-out one: the pairs are learnt by heart; fewer iterations.",
            "share 0..1",
        ),
        "pairs/margin": MetricDoc(
            "mean of the preferred piece's score less the other's", "Grows without end where no pair contradicts."
        ),
    }

    algorithm: Literal["music_preference"] = "music_preference"
    """Which method."""
    batch_size: Count = 32
    """Pairs per optimiser step, over all processes (MusicRL: 32)."""
    micro_batch: Count | None = None
    """Pairs per pass of the model, to save memory; null = all of a process."""

    @property
    def rows_per_pass(self) -> int:
        return self.micro_batch or self.batch_size

    def shared(self, config: VLMConfig) -> Shared:
        return Shared("trainer.batch_size", self.batch_size)

    def iteration(self, config: VLMConfig) -> Iterator[Row]:
        yield "optimiser steps", "1", f"of {self.batch_size} pairs of pieces"

    def problems(self, config: VLMConfig) -> Iterator[Finding]:
        if config.vlm.output != "music_reward":
            text = "scores of pieces are learnt by a MusicGen with a score; write output: music_reward"
            yield ("trainer.algorithm", "vlm.output"), text
        if config.vlm.lora is not None:
            yield ("vlm.lora",), "decoder and score are trained whole; leave it out"
        if config.rewards:
            yield ("rewards",), "pairs say what is better; leave it out"
