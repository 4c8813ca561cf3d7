"""VeriFree (arXiv 2505.21493): the right answer takes the place of the model's, and how likely it is there pays for the
reasoning before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import AnyOf
from genrl.vlm.methods.answers.settings import Answers
from genrl.vlm.recipe.preset import Aggregation, Preset
from genrl.vlm.recipe.presets import PresetName
from genrl.vlm.recipe.shaping import RewardTerm

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig


class VeriFree(Answers):
    """Reasoning is paid by the probability of the right answer after it, and the right answer is learnt with that
    probability as its weight. Column `answer`; the rewards' advantages are added."""

    title: ClassVar[str] = "VeriFree"
    takes = frozenset({"no_reward"})
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "right/probability": MetricDoc(
            "mean over answers of the product of the probabilities of the right answer's tokens after the answer's own "
            "reasoning; 0 without `<answer`",
            "Rises. Near 0 from the start: right answers are too long for a product; take the preset rlpr.",
            "share 0..1",
        ),
        "right/placed": MetricDoc("answers in which there is an `<answer` / answers", "Near 1.", "share 0..1"),
    }

    algorithm: Literal["verifree"] = "verifree"  # type: ignore[assignment]
    """Which method."""
    preset: PresetName = "rloo"
    """The method whose surrogate and advantages of rewards are used; the functions below are null = as it has them."""
    aggregation: Aggregation | None = "seq_sum"
    """From terms per token to one number."""
    reward_terms: tuple[Annotated[RewardTerm, Field(discriminator="name"), AnyOf(alone=True)], ...] | None = ()
    """Added to the rewards."""

    @property
    def name(self) -> str:
        return f"verifree on {self.preset}"

    def refused(self, config: VLMConfig, preset: Preset) -> Iterator[Finding]:
        yield from super().refused(config, preset)
        if preset.of_rows:
            text = f"reasoning and answer are paid apart, and {preset.of_rows} takes one advantage for both; write rloo"
            yield ("trainer.preset",), text
        if self.filter != "none":
            yield ("trainer.filter",), "it looks at rewards, and what is paid here is not among them; write none"
        if config.synthesis is not None:
            yield ("synthesis", "trainer.algorithm"), "its descriptions have no right answer; leave it out"
        if config.vlm.output != "text":
            yield (
                ("trainer.algorithm", "vlm.output"),
                "right answers are texts of tokens; write algorithm: answers",
            )
