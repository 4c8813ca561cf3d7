"""Supervised fine-tuning on answers that are given, or on preferences among them: its keys, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Fraction, NonNegative, Positive, Section, Share, Text
from genrl.objectives import MarkedLoss, PairLoss
from genrl.vlm.config.schema import Row, Shared, VLMMethod

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig


class Preference(Section):
    """What is learnt of which answers are better (DPO, IPO, APO, KTO, ORPO): pairs, or answers that are marked."""

    loss: PairLoss | MarkedLoss = "sigmoid"
    """sigmoid (DPO), robust, ipo, hinge, sigmoid_norm, nca_pair, apo_zero, apo_down, sppo_hard, orpo: of pairs. kto,
    apo_zero_unpaired: of answers whose column `label` says whether `target` is good, true or false."""
    beta: Positive = 0.1
    """How much a difference of log-probabilities from the model before training counts; of orpo, its weight."""
    smoothing: Fraction = 0.0
    """With sigmoid, sigmoid_norm and robust: the share of pairs that are labelled the wrong way round."""
    sft_weight: NonNegative = 0.0
    """Weight of the likelihood of the preferred answers, a mean over tokens."""
    rejected: Text = "rejected"
    """Of pairs: the answer that is worse than `target`, a column or a text with columns in braces."""
    desirable: Positive = 1.0
    """Weight of good answers."""
    undesirable: Positive = 1.0
    """Weight of bad answers (KTO: weight times number of either kind alike, up to 1.33 times more for good ones)."""

    @property
    def of_pairs(self) -> bool:
        return self.loss not in get_args(MarkedLoss)


class VLMSFT(VLMMethod):
    """Supervised fine-tuning: the mean negative log-probability of the tokens of the given answers; or preferences."""

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
        "preference/right": MetricDoc(
            "share of pairs whose preferred answer has gained more than the other one since before training; of marked "
            "answers: that are on their side of the baseline; a tie is half of one",
            "Rises from .5. Near 1 while `eval/preference_right` stays: learnt by heart.",
            "share 0..1",
        ),
        "preference/margin": MetricDoc("mean of what the loss takes the sigmoid of", "Rises."),
        "preference/target": MetricDoc(
            "mean log-probability of `target`, over its tokens",
            "Falls in DPO, with that of the other answer. By much: raise `preference.sft_weight`, or the beta.",
            "nats",
        ),
        "preference/equal": MetricDoc("share of pairs with equal answers, which are left out", "Look at the data."),
        "preference/baseline": MetricDoc("KTO's: mean gain of answers to other questions, at least 0", "Stays small."),
        "eval/preference_right": MetricDoc("`preference/right` of held-out pairs", "The aim.", "share 0..1"),
        "eval/preference_se": MetricDoc("standard error of it", "As `eval/total_se`."),
    }

    algorithm: Literal["sft"] = "sft"
    """Which method."""
    target: Text = "answer"
    """The answer that is taught: a column, or a text with columns in braces, "<answer> {answer} </answer>". Of a chat
    row the last message of the assistant is the column `answer`."""
    first_token_share: Share | None = None
    """Of the loss of an answer, the share of its first token, which a judge's yes or no is read from; the rest is that
    of the others in equal parts; null = all tokens alike, as they always are in `eval/loss`."""
    preference: Preference | None = None
    """Learn from pairs or marks which answers are better; null = to give the answers."""
    batch_size: Count = 32
    """Questions per optimiser step, over all processes."""
    updates: Count | None = 1
    """Optimiser steps of an iteration; null = as many as a pass over all questions takes, so that iterations are
    epochs."""
    micro_batch: Count | None = None
    """Questions per pass of the model, to save memory; null = all of a process."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset() if self.preference is None or self.preference.loss == "orpo" else frozenset({"ref"})

    @property
    def targets(self) -> tuple[str, ...]:
        """The answers to a question that a loss reads."""
        pairs = self.preference is not None and self.preference.of_pairs
        return (self.target, self.preference.rejected) if pairs and self.preference is not None else (self.target,)

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
        what = "their answers" if self.preference is None else "pairs" if self.preference.of_pairs else "marked answers"
        yield "optimiser steps", steps, f"of {self.batch_size} questions with {what}"

    def problems(self, config: VLMConfig) -> Iterator[Finding]:
        """What an answer in the data cannot be, and what reads sampled answers."""
        if config.vlm.makes:
            text = f"given answers are texts, and this model makes {config.vlm.makes}; write output: text"
            yield ("trainer.algorithm", "vlm.output"), text
        for name in ("augmentation", "synthesis"):
            if getattr(config, name) is not None:
                yield (name, "trainer.algorithm"), "is of answers that the model samples; leave it out"
        if (wanted := self.preference) is None:
            return
        key, kind = "trainer.preference", wanted.loss
        smoothed = kind in ("sigmoid", "sigmoid_norm", "robust")
        for wrong, where, text in (
            (wanted.smoothing and not smoothed, f"{key}.smoothing", f"{kind} has none; write 0"),
            (wanted.smoothing >= 0.5, f"{key}.smoothing", "half of the labels wrong say nothing; write less than 0.5"),
            (kind == "orpo" and not wanted.sft_weight, f"{key}.sft_weight", "ORPO is beside the likelihood; write 1"),
            (kind == "kto" and self.batch_size < 4, "trainer.batch_size", "KTO's baseline is a mean; write 4 or more"),
            (self.first_token_share, "trainer.first_token_share", "is of the likelihood of answers; write null"),
            (config.distributed.fsdp, "distributed.fsdp", "preferences ask a second model by itself; write false"),
        ):
            if wrong:
                yield (where, key), text
