"""Settings that the methods on the forward process share: finished samples, noised again. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Positive
from genrl.diffusion.config.schema import (
    AdvantageScale,
    Calls,
    DiffusionMethod,
    GuidanceInTraining,
    Guided,
    Refusable,
    Updating,
)

if TYPE_CHECKING:
    from genrl.data.prompts import Prompt
    from genrl.diffusion.config.schema import Config
    from genrl.diffusion.rollout.scoring import Scorers


FORWARD_ERROR = {
    "forward/error": MetricDoc(
        "mean of (prediction - target)^2 at the trained noise levels; of a flow the target is noise - sample",
        "The error of training a model on these samples. It need not fall: bad samples are unlearnt.",
        "velocity squared",
    )
}
"""Of AWM, DGPO, CRD and DPO."""
OLD_DECAY = {
    "policy/old_decay": MetricDoc(
        "decay d of the sampling policy: old <- d * old + (1 - d) * current",
        "0: sampling always uses the current policy. It rises as `old_policy_decay` says.",
        "0..1",
    )
}
"""Of DiffusionNFT and CRD."""
EMA_DECAY = {
    "policy/ema_decay": MetricDoc(
        "decay d of the slow copy (AWM, DGPO): copy <- d * copy + (1 - d) * current", "min(0.001 n, 0.3).", "0..1"
    )
}
"""Of AWM and DGPO."""


class Matching(Updating):
    """A method that trains a flow model at noise levels of its own finished samples."""

    advantage_scale: AdvantageScale = "global"
    """Divide centred rewards by the group's spread, by that of the whole iteration, or by nothing."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage (all peers: 5)."""

    def misfit(self, scheduler: str, is_flow: bool) -> Finding | None:
        if is_flow:
            return None
        text = f"{self.algorithm} needs a flow model, but this one predicts for {scheduler}"
        return ("trainer.algorithm",), f"{text}; use flow_grpo with kernel ddim"


def matching_calls(
    method: Updating, config: Config, guided: Guided, *, trained: float, states: float, train: float
) -> Calls:
    """Model calls of a method whose samples are drawn in all steps. trained: noise levels per sample; states: those
    trained in one pass over all samples, guidance included; train: forward calls of training."""
    sampling = config.sampling
    sampled = float(sampling.images_per_iteration * sampling.num_inference_steps)
    return Calls(sampled * guided(sampling.guidance_scale), train, states * method.epochs, trained)


def groups_of(count: int, config: Config) -> Iterator[Finding]:
    """Refuse groups of another size."""
    if config.sampling.group_size != count:
        text = f"{config.trainer.algorithm} has groups of {count}, found {config.sampling.group_size}; write {count}"
        yield ("sampling.group_size", "trainer.algorithm"), text


def too_many_levels(chosen: int, available: int, key: str) -> Iterator[Finding]:
    """Refuse more noise levels than there are; key: where their number comes from."""
    if chosen > available:
        text = f"{chosen} noise levels cannot be drawn from a grid of {available}; use {available} or less"
        yield ("trainer.timesteps_per_sample", key), text


def grid_levels(config: Config, chosen: int | None) -> Iterator[Finding]:
    """Refuse a sampling grid with fewer levels than are trained; chosen: how many, None = all but one."""
    steps = config.sampling.num_inference_steps
    if chosen is not None:
        yield from too_many_levels(chosen, steps, "sampling.num_inference_steps")
    elif steps < 2:
        text = "all noise levels but one are trained, and there is only 1; use 2 or more steps (paper: 10)"
        yield ("sampling.num_inference_steps", "trainer.algorithm"), text


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

    inner_epochs: Count = 1
    """Passes over the pairs of one iteration."""

    @property
    def compares(self) -> Literal["in_batch"]:
        return "in_batch"


class DiffusionDPO(Preference):
    """Diffusion-DPO, whoever made the pairs (arXiv 2311.12908)."""

    title: ClassVar[str] = "Diffusion-DPO"
    metrics: ClassVar[Mapping[str, MetricDoc]] = FORWARD_ERROR
    refuses: ClassVar[Mapping[Refusable, str]] = {"float16": "the gradient grows with beta"}

    beta: Positive
    """Sharpness of the preference."""
    reference_every: Count | None = None
    """The trained model becomes the reference every so many optimiser steps (Flow-GRPO's online DPO: 40); null = never
    (Diffusion-DPO)."""
    timesteps_per_sample: Count = 1
    """Noise levels trained per pair, each sampled separately (Diffusion-DPO: 1)."""
    guidance_in_training: GuidanceInTraining = False
    """Train with the guidance of sampling (other trainers: false); detached = without a gradient through its
    unconditional prediction. If it is an input of the model (FLUX.1-dev), it stays."""

    @property
    def reference(self) -> Literal["begun"] | None:
        return "begun" if self.reference_every is None else None

    @property
    def other_guidance(self) -> tuple[float, ...]:
        return () if self.guidance_in_training else (1.0,)

    def calls(self, config: Config, guided: Guided) -> Calls:
        """The policy and the reference, for both pictures of each pair; all pairs decided."""
        guidance = guided(config.sampling.guidance_scale) if self.guidance_in_training else 1
        states = 2.0 * config.sampling.prompts_per_iteration * self.timesteps_per_sample * guidance
        trained = float(self.timesteps_per_sample)
        return matching_calls(self, config, guided, trained=trained, states=states, train=states * 2.0 * self.epochs)

    def snapshots(self, config: Config) -> list[str]:
        return [] if self.reference_every is None else ["refreshed reference"]


class Differentiating(DiffusionMethod):
    """A method whose gradients come through the rewards and the decoder."""

    rewards_are = "differentiated"

    @property
    def compares(self) -> None:
        """A gradient needs no comparison."""

    def check_data(self, config: Config, scorers: Scorers, prompts: list[Prompt]) -> None:
        from genrl.diffusion.forward.direct import check

        check(config, scorers)

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        for index, reward in enumerate(config.rewards):
            if reward.weight != 0:
                yield from self._gradients_end(config, index)

    def _gradients_end(self, config: Config, index: int) -> Iterator[Finding]:
        """Settings of a reward behind which it has no gradients."""
        reward, at, algorithm = config.rewards[index], f"rewards.{index}", self.algorithm
        for key, allowed in (("remote", "null"), ("isolate", "false")):
            if getattr(reward, key):
                text = f"{algorithm} needs the reward's gradient, which stays in the process that computes it"
                yield (f"{at}.{key}", "trainer.algorithm"), f"{text}; write {allowed}, or give it weight 0"
        if reward.gate is not None:
            text = f"{algorithm} differentiates the reward itself, not what a gate makes of it; write null"
            yield (f"{at}.gate", "trainer.algorithm"), text
        if reward.normalize != "none":
            text = f"{algorithm} differentiates the reward itself, with its weight as it is; write none"
            yield (f"{at}.normalize", "trainer.algorithm"), text
