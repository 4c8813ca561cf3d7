"""Advantage weighted matching: a policy gradient on the forward process (arXiv 2509.25050)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, NonNegative, Positive
from genrl.diffusion.config.schema import Calls, Guided, first_update
from genrl.diffusion.forward.settings import EMA_DECAY, FORWARD_ERROR, Matching, matching_calls
from genrl.diffusion.steps.settings import METRICS as POLICY_METRICS

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

METRICS = (
    {name: POLICY_METRICS[name] for name in ("loss/policy", "ratio/mean", "ratio/std", "ratio/max_abs_dev")}
    | {
        "kl/ema": MetricDoc(
            "mean of (velocity - that of the slow copy)^2 (AWM), before its weight",
            "How far the last updates went.",
            "velocity squared",
        ),
    }
    | FORWARD_ERROR
    | EMA_DECAY
)


class AWM(Matching):
    """Advantage weighted matching: a policy gradient on the forward process (arXiv 2509.25050)."""

    title: ClassVar[str] = "AWM"
    takes = frozenset({"part_of_groups"})
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS

    algorithm: Literal["awm"] = "awm"
    """Which trainer."""
    timesteps_per_sample: Count = 6
    """Noise levels trained per sample, of the sampling grid without the first and the last tenth: stratified, the same
    for all of an iteration (AWM: 6)."""
    advantage_clip: Positive = 5.0
    """Advantages are cut at this and divided by it (AWM: 5)."""
    clip_range: Positive = 1.0
    """Ratio kept in 1 - c .. 1 + c (AWM: 1, which with one update per iteration never clips)."""
    kl_weight: NonNegative = 1e-3
    """Weight of the squared velocity difference from the starting model (AWM: 1e-3, OCR 3e-3, PickScore 1e-4)."""
    ema_kl_weight: NonNegative = 1.0
    """Weight of that from a slow copy of the policy, which keeps min(0.001 n, 0.3) of itself (AWM: 1)."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch (AWM: 1); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (AWM: 1)."""

    @property
    def reference(self) -> Literal["begun"] | None:
        return "begun" if self.kl_weight > 0 else None

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        if config.sampling.num_inference_steps < 2:
            text = "neither the first noise level is trained nor the last; use 2 or more steps (AWM: 14)"
            yield ("sampling.num_inference_steps", "trainer.algorithm"), text

    def calls(self, config: Config, guided: Guided) -> Calls:
        """The policy, the reference and the slow copy; and the old policy, from the second update on."""
        sampling, guidance = config.sampling, guided(config.sampling.guidance_scale)
        trained, images = float(self.timesteps_per_sample), sampling.images_per_iteration
        calls = guidance * (1.0 + (self.kl_weight > 0) + (self.ema_kl_weight > 0)) * self.epochs
        if self.updates * self.epochs > 1:
            calls += guidance * (self.epochs - first_update(config, self.updates) / images)
        states = images * trained
        return matching_calls(self, config, guided, trained=trained, states=states * guidance, train=states * calls)

    def snapshots(self, config: Config) -> list[str]:
        return ["slow copy", *(["old policy"] if self.updates * self.epochs > 1 else [])]
