"""Policy gradients over groups of answers to questions: GRPO and the published methods of its family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.method import Finding
from genrl.config.section import Whole
from genrl.vlm.recipe.advantages import CriticAdvantage
from genrl.vlm.recipe.method import RecipeMethod
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.regularisers import ValueLoss

if TYPE_CHECKING:
    from genrl.config.vlm import VLMConfig


class Answers(RecipeMethod):
    """Groups of answers to questions, worth what the rewards say: a published method by name, and what is changed of
    it."""

    title: ClassVar[str] = "Methods over groups of answers"

    algorithm: Literal["answers"] = "answers"
    """Which method."""
    filter: Literal["none", "spread", "not_all_right"] = "none"
    """Groups that are trained on: all; those with two different rewards (DAPO); all but those whose first reward is
    always 1 (NGRPO)."""
    resample: Whole = 0
    """Most further rounds of sampling while `filter` leaves too few groups (DAPO); 0 = train on what is left."""

    @property
    def group_filter(self) -> Literal["none", "spread", "not_all_right"]:
        return self.filter

    @property
    def rounds(self) -> int:
        return 1 + self.resample

    def refused(self, config: VLMConfig, preset: Preset) -> Iterator[Finding]:
        if isinstance(preset.advantage, CriticAdvantage):
            text = "a critic learns from episodes: write environment in place of task; nearest here: grpo"
            yield (self.key("advantage"), "task"), text
            return
        yield from super().refused(config, preset)
        if any(isinstance(one, ValueLoss) for one in preset.regularisers):
            yield (self.key("regularisers"),), "answers to questions have no critic; leave out {name: value}"
        if self.updates > config.generation.prompts_per_iteration:
            text = f"{self.updates} updates need a group each; there are {config.generation.prompts_per_iteration}"
            yield ("trainer.updates", "generation.prompts_per_iteration"), text
        if self.resample and self.filter == "none":
            yield ("trainer.resample", "trainer.filter"), "without a filter no group is missing; write filter: spread"
        if config.generation.group_size < 2 and self.filter == "spread":
            yield ("trainer.filter", "generation.group_size"), "one answer has no spread; write 2 or more (8 is usual)"
