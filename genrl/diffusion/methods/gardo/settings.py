"""GARDO: a divergence that only over-rated samples pay, from a reference that follows (arXiv 2512.24138)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, NonNegative, Positive, Section, Share, Text
from genrl.diffusion.config.schema import AdvantageScale
from genrl.diffusion.steps.settings import METRICS, Windowed

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config


class Gate(Section):
    """Which samples pay the divergence: those that the trained score rates above what others say of them."""

    between: ClassVar[tuple[float, float]] = (0.02, 0.2)
    """The share never falls below the first, nor rises above the second (theirs)."""

    rewards: tuple[Text, ...]
    """Labels of the rewards that are asked beside it, for example of weight 0."""
    share: Share = 0.1
    """Of the samples that are over-rated at all, the share that pays at first."""


class Moving(Section):
    """When the reference becomes the present model."""

    reset_kl: Positive = 3e-4
    """Once the mean divergence of an iteration is above this;"""
    reset_every: Count = 15
    """or after so many iterations."""


class GARDO(Windowed):
    """GARDO (arXiv 2512.24138): Flow-GRPO against fooled rewards. Over-rated samples alone pay a divergence, whose
    reference follows the model, and good samples count for more where they are unlike the others."""

    title: ClassVar[str] = "GARDO"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS | {
        "gate/share": MetricDoc(
            "share of the over-rated samples that are to pay the divergence",
            "At 0.2, its upper end, for long: the trained score and the others part further and further.",
            "share 0..1",
        ),
        "gate/gated": MetricDoc(
            "share of all samples that pay it", "0: nothing stands out by its over-rating.", "share 0..1"
        ),
        "gate/most": MetricDoc(
            "largest over-rating: share of samples with a lower trained score less that with a lower other score",
            "Near 1: the sample that the trained score likes best is among the others' worst. Look at it.",
            "share 0..1",
        ),
        "reference/moved": MetricDoc(
            "how often the reference has become the present model", "Every iteration: raise `reference_model.reset_kl`."
        ),
    }

    algorithm: Literal["gardo"] = "gardo"
    """Which trainer."""
    advantage_scale: AdvantageScale = "none"
    """Divide centred rewards by nothing (theirs), by the group's spread, or by that of the whole iteration."""
    kl_weight: NonNegative = 0.04
    """Weight of the divergence, of the samples that pay it (theirs: 0.04)."""
    gate: Gate | None = None
    """Who pays it; null = all."""
    reference_model: Moving | None = Moving()
    """When the reference follows; null = it stays the model before training."""
    diversity: Text | None = None
    """Label of a reward that says how far a sample is from the nearest of its group: advantages above 0 are multiplied
    by it, over its group's mean; null = as they are."""

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        if self.kl_weight == 0:
            yield ("trainer.kl_weight",), "without a divergence nothing is gated; write 0.04, or use flow_grpo"
        labels = [*(() if self.gate is None else self.gate.rewards), *filter(None, [self.diversity])]
        if unknown := [label for label in labels if label not in config.reward_labels]:
            text = f"no reward is called {unknown[0]!r}; there are {', '.join(config.reward_labels)}"
            yield ("trainer.diversity" if unknown[0] == self.diversity else "trainer.gate", "rewards"), text
        if self.gate is not None and not (
            self.gate.rewards and self.gate.between[0] <= self.gate.share <= self.gate.between[1]
        ):
            yield ("trainer.gate",), "name one reward or more that is asked, and a share that lies between"
