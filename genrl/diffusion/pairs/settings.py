"""Settings that the methods on preferences between finished pictures share. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from genrl.config.method import MetricDoc
from genrl.config.section import Count, Positive
from genrl.diffusion.config.schema import Calls, GuidanceInTraining, Guided, Updating
from genrl.diffusion.forward.settings import FORWARD_ERROR, matching_calls

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

METRICS = {
    "preference/pairs": MetricDoc(
        "pairs that differ in reward / all pairs (DPO: one per group; D3PO: all within the groups)",
        "Only these are trained on. Near 0: the reward hardly tells the samples of a prompt apart.",
        "share 0..1",
    ),
    "preference/correct": MetricDoc(
        "share of the trained pairs whose winner the policy raised more against the reference than the loser",
        "0 in the first update of a run, when both are equal; afterwards above 0.5 where the preferences of earlier "
        "iterations hold for new pairs.",
        "share 0..1",
    ),
    "preference/logit": MetricDoc(
        "mean of what the sigmoid is taken of", "Far above 1: the pairs are settled, lower beta or stop."
    ),
}


class Preference(Updating):
    """A method on pairs of pictures of one prompt."""

    title: ClassVar[str] = "Preferences between pictures"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS
    whole_groups: ClassVar[bool] = True

    inner_epochs: Count = 1
    """Passes over the pairs of one iteration."""


class DiffusionDPO(Preference):
    """Diffusion-DPO, whoever made the pairs (arXiv 2311.12908)."""

    title: ClassVar[str] = "Diffusion-DPO"
    metrics: ClassVar[Mapping[str, MetricDoc]] = FORWARD_ERROR
    not_in_float16: ClassVar[str] = "the gradient grows with beta"

    beta: Positive
    """Sharpness of the preference."""
    reference_every: Count | None = None
    """The trained model becomes the reference every so many optimiser steps (Flow-GRPO's online DPO: 40); null = never
    (Diffusion-DPO)."""
    timesteps_per_pair: Count = 1
    """Noise levels trained per pair, each sampled separately (Diffusion-DPO: 1)."""
    guidance_in_training: GuidanceInTraining = False
    """Train with the guidance of sampling (other trainers: false); detached = without a gradient through its
    unconditional prediction. If it is an input of the model (FLUX.1-dev), it stays."""

    @property
    def uses_reference(self) -> bool:
        """Whether training evaluates the model before training."""
        return self.reference_every is None

    @property
    def other_guidance(self) -> tuple[float, ...]:
        return () if self.guidance_in_training else (1.0,)

    def calls(self, config: Config, guided: Guided) -> Calls:
        """The policy and the reference, for both pictures of each pair; all pairs decided."""
        guidance = guided(config.sampling.guidance_scale) if self.guidance_in_training else 1
        states = 2.0 * config.sampling.prompts_per_iteration * self.timesteps_per_pair * guidance
        trained = float(self.timesteps_per_pair)
        return matching_calls(config, guided, trained=trained, states=states, train=states * 2.0 * self.epochs)

    def snapshots(self, config: Config) -> list[str]:
        """Copies of the trained parameters that a run comes to keep."""
        return [] if self.reference_every is None else ["refreshed reference"]
