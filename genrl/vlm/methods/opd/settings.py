"""On-policy distillation of language models: the model answers, and a teacher says how likely it would have been to say
each token. A teacher is another model with the same tokens, or the model before training with more in its prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, NonNegative, Section, Text
from genrl.vlm.config.schema import Row
from genrl.vlm.methods.answers.settings import Answers
from genrl.vlm.recipe import Factor
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.presets import PresetName

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig

ROUTE = "teacher"
"""Column of the questions that names the teacher of each, where there are several."""
LEAST = 0.01
"""Smallest beta of GKD's distance that is no KL: below it the distance vanishes with beta, it is not the forward KL."""


class Teacher(Section):
    """One who says how likely the model's answers would have been."""

    path: Text | None = None
    """A model with the same tokens, a folder or a hub id; null = the model before training."""
    prompt: Text = "{question}"
    """What it reads in place of the question's text: a text with {question} and the row's columns in braces. With the
    answer in it, the model teaches itself (SDFT, arXiv 2601.19897)."""


class LanguageOPD(Answers):
    """On-policy distillation: a method of groups of answers, by its preset, whose tokens are paid by a teacher."""

    title: ClassVar[str] = "On-policy distillation of language models"
    takes = frozenset({"part_of_groups"})
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "teacher/gap": MetricDoc(
            "mean over tokens of the answers of log-prob of the model - log-prob of the teacher, before the update",
            "Estimates the KL from the model to its teacher. Falls; level from the start: the rate is too low.",
            "nats",
        ),
        "teacher/k3": MetricDoc(
            "mean over the same tokens of exp(d) - d - 1, d = log-prob of the teacher - log-prob of the model",
            "As `teacher/gap`, never negative. Large while that is small: tokens that the teacher would never say.",
            "nats",
        ),
        "loss/distill": MetricDoc("the distance of distributions in `loss`, weight included", "As `teacher/gap`."),
    }

    algorithm: Literal["opd"] = "opd"  # type: ignore[assignment]
    """Which method."""
    preset: PresetName = "dapo"
    """The method whose surrogate and mean over tokens are used; the functions below are null = as it has them."""
    teachers: Annotated[dict[Text, Teacher], Field(min_length=1)] = {"teacher": Teacher()}
    """Who teaches, by name; all have the model's tokens. Of several, the column `teacher` names that of each question.
    """
    estimator: Literal["sampled", "distribution"] = "sampled"
    """The gap of log-probabilities of each sampled token as its advantage (policy gradient of the reverse KL), or a
    distance of whole distributions in the loss."""
    beta: Factor = 1.0
    """Which distance: 0 the forward KL, 1 the reverse KL, else GKD's between them (arXiv 2306.13649)."""
    top: Count | None = 32
    """Distributions are those of so many tokens, the model's likeliest (with beta below .5 the teacher's), and of all
    others together; null = all tokens."""
    reward_coef: NonNegative = 0.0
    """Factor of the preset's advantages of the rewards, which are only watched at 0. That of the gap, or of the
    distance, is 1."""

    @property
    def name(self) -> str:
        return f"opd on {self.preset}"

    def iteration(self, config: VLMConfig) -> Iterator[Row]:
        yield from super().iteration(config)
        yield (
            "further forward",
            "teacher",
            f"the answers under {' or '.join(self.teachers)}",
        )

    def refused(self, config: VLMConfig, preset: Preset) -> Iterator[Finding]:
        yield from super().refused(config, preset)
        if 0 < self.beta < LEAST or 1 - LEAST < self.beta < 1:
            yield ("trainer.beta",), f"so near to 0 or 1 the distance vanishes; write 0, 1, or {LEAST} to {1 - LEAST}"
        if preset.of_rows:
            text = f"a teacher pays tokens, and {preset.of_rows} takes one advantage per answer; nearest: dapo"
            yield (self.key("surrogate" if preset.group_loss is None else "group_loss"),), text
        if lacks := sorted(preset.reads & {"degraded", "entropy", "bound"}):
            yield ("trainer.preset",), f"it reads {lacks[0]} in the update, which opd does not make; nearest: dapo"
        if config.vlm.makes:
            text = f"teachers judge texts; this model makes {config.vlm.makes}; nearest: algorithm: answers"
            yield ("trainer.algorithm", "vlm.output"), text
        if config.distributed.fsdp:
            yield ("distributed.fsdp", "trainer.algorithm"), "teachers are not in shards; write false"
        if config.synthesis is not None:
            yield ("synthesis", "trainer.algorithm"), "its descriptions have no teacher; leave it out, or use answers"
