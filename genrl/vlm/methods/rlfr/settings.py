"""RLFR (arXiv 2510.10201): a method of groups of answers whose tokens are also paid by a flow over hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Fraction, NonNegative, Positive, Section, Text
from genrl.vlm.config.schema import Row
from genrl.vlm.methods.answers.settings import Answers
from genrl.vlm.recipe.preset import Preset

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig


class Flow(Section):
    """The flow over hidden states, which is fitted to good answers, and what tokens are paid by it."""

    most: ClassVar[int] = 15
    """Tokens of an answer that are charged at most, those of largest error (its script)."""
    times: ClassVar[tuple[float, ...]] = (0.8,)
    """Where between noise (0) and hidden state (1) errors are measured (its script)."""
    layers: ClassVar[tuple[float, ...]] = (0.25, 0.5, 0.75)
    """Which layers' hidden states, as shares of the language model's depth; errors are averaged over them."""

    batch_size: ClassVar[int] = 32
    """Questions per step of the fit to demonstrations, over all processes."""

    coefficient: NonNegative = 0.01
    """Weight of the flow's reward (its script: .01)."""
    threshold: Fraction = 0.6
    """Tokens are charged whose velocity error, from 0 to 1 within their answer, is above this (its script: .6)."""
    depth: Count = 4
    """Residual blocks of the network (its code: 4 for 3B, 6 for 7B); it is as wide as the language model."""
    lr: Positive = 1e-4
    """Learning rate of the flow (its script: 1e-4)."""
    demonstrations: Text | None = None
    """Answers that the flow is fitted to before training: a column, or a text with columns in braces, "<answer>
    {answer} </answer>"; null = it begins with the first right answers of the model itself."""
    pretraining: Count = 200
    """Steps of that fit."""


class RLFR(Answers):
    """RLFR: a method of groups of answers, by its preset, whose tokens are also paid by how far their hidden states lie
    from a flow that is fitted to right answers."""

    title: ClassVar[str] = "RLFR"
    takes = frozenset({"part_of_groups"})
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "flow/error_right": MetricDoc(
            "mean over tokens of the answers that are right (first reward >= `evaluation.right_at`) of the flow's mean "
            "squared velocity error, which the flow is fitted to lower",
            "Falls as the flow learns, and rises where the model moves faster than the flow follows.",
        ),
        "flow/error_wrong": MetricDoc(
            "the same of the other answers",
            "Above `flow/error_right`: the flow tells right answers from others. Equal: its reward is noise.",
        ),
        "flow/charged": MetricDoc(
            "tokens that the flow charges for / tokens", "By `trainer.flow.threshold`.", "share 0..1"
        ),
        "flow/advantage": MetricDoc(
            "mean over tokens of the absolute value that the flow adds to the advantage",
            "Compare it with `advantage/abs_mean`, which is without it: far below, it only breaks ties.",
        ),
        "grad_norm/flow": MetricDoc(
            "norm of the flow's gradient, before clipping", "As `grad_norm`; 0: none was right."
        ),
    }

    algorithm: Literal["rlfr"] = "rlfr"  # type: ignore[assignment]
    """Which method."""
    flow: Flow = Flow()
    """The flow."""

    @property
    def name(self) -> str:
        return f"rlfr on {self.preset}"

    @property
    def demonstrations(self) -> tuple[str, str] | None:
        target = self.flow.demonstrations
        return None if target is None else ("trainer.flow.demonstrations", target)

    def iteration(self, config: VLMConfig) -> Iterator[Row]:
        yield from super().iteration(config)
        yield "further forward", "flow", "hidden states of the answers; a step of the flow on the right ones"

    def refused(self, config: VLMConfig, preset: Preset) -> Iterator[Finding]:
        yield from super().refused(config, preset)
        if preset.of_rows:
            field = "surrogate" if preset.group_loss is None else "group_loss"
            text = f"the flow pays tokens, and {preset.of_rows} takes one advantage per answer; nearest: preset: grpo"
            yield (self.key(field),), text
        if config.vlm.makes:
            text = f"the flow is over hidden states of a language model that answers; this one makes {config.vlm.makes}"
            yield ("trainer.algorithm", "vlm.output"), f"{text}; nearest: algorithm: answers"
        if config.distributed.fsdp:
            yield (
                ("distributed.fsdp", "trainer.algorithm"),
                "rlfr reads hidden states, not tried in shards; write false",
            )
        if config.synthesis is not None:
            text = "descriptions are right by no reward, which the flow is fitted by; leave it out, or use answers"
            yield ("synthesis", "trainer.algorithm"), text
