"""Supervised fine-tuning on answers that are given: its keys, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Share, Text
from genrl.vlm.config.schema import Row, Shared, VLMMethod

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig


class VLMSFT(VLMMethod):
    """Supervised fine-tuning: the mean negative log-probability of the tokens of the given answers."""

    learns_from = "data"
    title: ClassVar[str] = "Supervised fine-tuning of vision-language models"
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "eval/loss": MetricDoc(
            "mean negative log-probability of the tokens of the held-out questions' answers, where these have the "
            "columns of `trainer.target`; in a run in stages those of the last stage of sft so far",
            "Rises while `loss` falls: the answers are learnt by heart; fewer epochs, more data.",
            "nats",
        ),
        "eval/loss_se": MetricDoc("standard error of `eval/loss` over the tokens", "As `eval/total_se`.", "nats"),
        "target/tokens_mean": MetricDoc(
            "tokens of the given answers of an iteration, their ends included / answers",
            "What is learnt from.",
            "tokens",
        ),
        "target/padding": MetricDoc(
            "1 - tokens that are there / positions that the language model computed, prompts included",
            "What padding costs. 0 with `vlm.packing`; high: rows are of unlike length, or the micro-batch is large.",
            "share 0..1",
        ),
    }

    algorithm: Literal["sft"] = "sft"
    """Which method."""
    target: Text = "answer"
    """The answer that is taught: a column, or a text with columns in braces, "<answer> {answer} </answer>". Of a chat
    row the last message of the assistant is the column `answer`."""
    first_token_share: Share | None = None
    """Of the loss of an answer, the share of its first token, which a judge's yes or no is read from; the rest is that
    of the others in equal parts; null = all tokens alike, as they always are in `eval/loss`."""
    batch_size: Count = 32
    """Questions per optimiser step, over all processes."""
    updates: Count | None = 1
    """Optimiser steps of an iteration; null = as many as a pass over all questions takes, so that iterations are
    epochs."""
    micro_batch: Count | None = None
    """Questions per pass of the model, to save memory; null = all of a process."""

    @property
    def demonstrations(self) -> tuple[str, str]:
        return "trainer.target", self.target

    @property
    def rows_per_pass(self) -> int:
        return self.micro_batch or self.batch_size

    def shared(self, config: VLMConfig) -> Shared:
        return Shared("trainer.batch_size", self.batch_size)

    def iteration(self, config: VLMConfig) -> Iterator[Row]:
        steps = "a pass over all questions" if self.updates is None else f"{self.updates:,}"
        yield "optimiser steps", steps, f"of {self.batch_size} questions with their answers"

    def problems(self, config: VLMConfig) -> Iterator[Finding]:
        """What an answer in the data cannot be, and what reads sampled answers."""
        if config.vlm.makes:
            text = f"given answers are texts, and this model makes {config.vlm.makes}; write output: text"
            yield ("trainer.algorithm", "vlm.output"), text
        for name in ("augmentation", "synthesis"):
            if getattr(config, name) is not None:
                yield (name, "trainer.algorithm"), "is of answers that the model samples; leave it out"
