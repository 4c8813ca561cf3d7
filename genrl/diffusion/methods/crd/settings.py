"""Centred reward distillation: differences of implicit rewards within a prompt (arXiv 2603.14128)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, NonNegative, Positive
from genrl.diffusion.config.schema import Calls, Guided
from genrl.diffusion.forward.settings import FORWARD_ERROR, OLD_DECAY, Matching, grid_levels, matching_calls

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

METRICS = (
    {
        "crd/residual": MetricDoc(
            "mean of the distillation loss: [beta (implicit - centre) - (aim - centre)]^2",
            "Falls as differences of implicit rewards become those of the rewards. Compare within one run only.",
        ),
        "crd/implicit_abs": MetricDoc(
            "mean of |implicit reward|, the old policy's matching error minus the present one's",
            "0 in the first update; then how far the policy is from the old one.",
        ),
        "policy/sampling_decay": MetricDoc(
            "decay d of the policy that samples (CRD): sampling <- d * sampling + (1 - d) * current",
            "0 for the first 75 optimiser steps, then it rises.",
            "0..1",
        ),
    }
    | FORWARD_ERROR
    | OLD_DECAY
)


class CRD(Matching):
    """Centred reward distillation: differences of implicit rewards within a prompt (arXiv 2603.14128)."""

    title: ClassVar[str] = "CRD"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS

    algorithm: Literal["crd"] = "crd"
    """Which trainer."""
    beta: Positive = 1.0
    """Scale of the implicit reward (CRD: 1)."""
    kl_weight: NonNegative = 0.1
    """Weight of the squared velocity difference from the starting model, for the best samples (CRD: 0.1)."""
    timesteps_per_sample: Count | None = None
    """Noise levels of the sampling grid trained per sample, the same for all; null = all of them but one."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage; it also scales the loss (CRD: 5)."""
    updates_per_iteration: Count = 2
    """Optimiser steps per inner epoch (CRD: 2); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (CRD: 1)."""

    @property
    def reference(self) -> Literal["begun"] | None:
        return "begun" if self.kl_weight > 0 else None

    @property
    def compares(self) -> Literal["in_batch"]:
        return "in_batch"

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        yield from grid_levels(config, self.timesteps_per_sample)

    def calls(self, config: Config, guided: Guided) -> Calls:
        """The policy, the old one, and the reference."""
        sampling, guidance = config.sampling, guided(config.sampling.guidance_scale)
        each = (3.0 if self.kl_weight > 0 else 2.0) * guidance
        trained = float(self.timesteps_per_sample or max(1, sampling.num_inference_steps - 1))
        states = sampling.images_per_iteration * trained
        train = states * each * self.epochs
        return matching_calls(self, config, guided, trained=trained, states=states * guidance, train=train)

    def snapshots(self, config: Config) -> list[str]:
        return ["old policy", "sampling policy"]
