"""Direct group preference optimisation: one preference of a whole group (arXiv 2510.08425)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Margin, NonNegative, Positive
from genrl.diffusion.config.schema import Calls, GuidanceInTraining, Guided
from genrl.diffusion.forward.settings import EMA_DECAY, FORWARD_ERROR, Matching, matching_calls, too_many_levels

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

METRICS = (
    {
        "dgpo/group_weight": MetricDoc(
            "mean of sigmoid(S) over samples, S = beta * mean over the group of advantage * (error - reference error)",
            "0.5 in the first update. Falls as the groups come into order; near 0: nothing is left to learn at this "
            "beta.",
            "0..1",
        ),
        "dgpo/clip_frac": MetricDoc(
            "share of samples whose ratio to the slow average is beyond 1 +- clip_range: no gradient",
            "Above 0.5: lower the learning rate, or raise clip_range.",
            "share 0..1",
        ),
    }
    | FORWARD_ERROR
    | EMA_DECAY
)


class DGPO(Matching):
    """Direct group preference optimisation: one preference of a whole group (arXiv 2510.08425)."""

    title: ClassVar[str] = "DGPO"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS

    algorithm: Literal["dgpo"] = "dgpo"
    """Which trainer."""
    beta: Positive = 100.0
    """Sharpness of the group's preference (DGPO: 100, PickScore 10)."""
    kl_weight: NonNegative = 0.02
    """Weight of the squared velocity difference from the starting model (DGPO: 0.02, PickScore 1e-3)."""
    guidance_in_training: GuidanceInTraining = False
    """Train under the guidance of sampling (DGPO: false, even if it samples with 4.5); detached = without a gradient
    through its unconditional prediction. An input of the model stays."""
    first_steps: Count = 7
    """Noise levels are those of the first steps of the sampling grid, so many (DGPO: 7 of 10, GenEval 5)."""
    timesteps_per_sample: Count = 4
    """Noise levels trained per sample, without repetition, the same for all of an iteration (DGPO: 4)."""
    clip_range: Margin = 1e-2
    """No gradient where the ratio to the slow average is beyond 1 +- c (DGPO: 1e-2, PickScore 5e-2, unguided 1e-3)."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch (DGPO: 1); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (DGPO: 1)."""

    @property
    def reference(self) -> Literal["begun"]:
        return "begun"

    @property
    def other_guidance(self) -> tuple[float, ...]:
        return () if self.guidance_in_training else (1.0,)

    @property
    def compares(self) -> Literal["in_batch"]:
        return "in_batch"

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        steps = config.sampling.num_inference_steps
        if self.first_steps > steps:
            text = f"the sampling grid has {steps} steps; use {steps} or less"
            yield ("trainer.first_steps", "sampling.num_inference_steps"), text
        yield from too_many_levels(self.timesteps_per_sample, min(steps, self.first_steps), "trainer.first_steps")

    def calls(self, config: Config, guided: Guided) -> Calls:
        """The policy, the slow average, and the reference."""
        guidance = guided(config.sampling.guidance_scale) if self.guidance_in_training else 1
        trained = float(self.timesteps_per_sample)
        states = config.sampling.images_per_iteration * trained
        train = states * 3.0 * guidance * self.epochs
        return matching_calls(self, config, guided, trained=trained, states=states * guidance, train=train)

    def snapshots(self, config: Config) -> list[str]:
        return ["slow copy"]
