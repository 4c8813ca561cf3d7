"""Forward-process training on finished samples, without log-probabilities (arXiv 2509.16117)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, NonNegative, Positive
from genrl.diffusion.config.schema import Calls, Guided, first_update
from genrl.diffusion.forward.settings import OLD_DECAY, Matching, grid_levels, matching_calls

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

METRICS = {
    "nft/reward_weight_mean": MetricDoc(
        "mean of r = clip(advantage / advantage_clip, -1, 1) / 2 + 1/2 over samples (DiffusionNFT, arXiv 2509.16117)",
        "0.5 for centred advantages.",
        "0..1",
    ),
    "nft/old_deviation": MetricDoc(
        "mean of (velocity - old velocity)^2 over elements",
        "How far the policy moved from the one that sampled. A steep rise comes before divergence.",
        "velocity squared",
    ),
} | OLD_DECAY


class DiffusionNFT(Matching):
    """Forward-process training on finished samples, without log-probabilities (arXiv 2509.16117)."""

    title: ClassVar[str] = "DiffusionNFT"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS
    takes = frozenset({"recorded_calls", "older_samples", "part_of_groups"})

    algorithm: Literal["diffusion_nft"] = "diffusion_nft"
    """Which trainer."""
    beta: Positive = 1.0
    """Distance of the implicit positive and negative policies from the old one (paper: 1, or 0.1 for OCR)."""
    kl_weight: NonNegative = 1e-4
    """Weight of the squared velocity difference from the starting model (paper: 1e-4)."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage; it also scales the loss (paper: 5)."""
    timesteps_per_sample: Count | None = None
    """Noise levels trained per sample, chosen at random from the sampling grid; null = all of them but one."""
    old_policy_decay: Literal["none", "ramp", "delayed_ramp"] = "ramp"
    """How slowly the sampling policy follows: at once, min(0.001 n, 0.5), or 0 until step 75, then up."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch (paper: 1, OCR 2); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (paper: 1)."""

    @property
    def reference(self) -> Literal["begun"] | None:
        return "begun" if self.kl_weight > 0 else None

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        yield from grid_levels(config, self.timesteps_per_sample)

    def calls(self, config: Config, guided: Guided) -> Calls:
        """The policy, the old one, and the reference for its KL."""
        sampling, guidance = config.sampling, guided(config.sampling.guidance_scale)
        trained = float(self.timesteps_per_sample or sampling.num_inference_steps - 1)
        states = sampling.images_per_iteration * trained
        train = (3 if self.kl_weight > 0 else 2) * states * self.epochs * guidance
        if self.old_policy_decay == "none":
            # Until the first update the old policy is the present one, and its call is saved.
            train -= first_update(config, self.updates) * trained * guidance
        return matching_calls(self, config, guided, trained=trained, states=states * guidance, train=train)

    def snapshots(self, config: Config) -> list[str]:
        return ["old policy"]
