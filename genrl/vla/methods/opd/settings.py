"""On-policy distillation of policies: the policy acts, and a trained one says how it would have taken its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import NonNegative, Text
from genrl.vla.methods.settings import Update

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


class PolicyOPD(Update):
    """On-policy distillation: a policy acts, and a trained one says how likely it would have taken its steps."""

    title: ClassVar[str] = "On-policy distillation of policies"
    imitates = "never"
    measured: ClassVar[tuple[str, ...]] = ("teacher/kl",)
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "teacher/kl": MetricDoc(
            "KL from a scored step of the policy to its teacher's, per number of an action; mean over decisions",
            "Falls. Level from the start: the rate is too low, or the teacher is too far to be followed.",
            "nats",
        )
    }

    algorithm: Literal["opd"] = "opd"
    """Which trainer."""
    teacher: Text
    """A policy of the same inputs, chunks and units: a folder, a hub id, or a run. A new policy gets them from it."""
    estimator: Literal["distribution", "sampled"] = "distribution"
    """The exact KL of each step, Gaussian or of tokens, in the loss; or the gap of log-probabilities of what was drawn
    as its advantage (RLinf), whose expected gradient is the same."""
    reward_coef: NonNegative = 0.0
    """Factor of GRPO's advantages of the rewards, which are only watched at 0; the KL has the weight 1."""
    level: Literal["chunk", "action", "element"] = "element"
    """What has its own ratio, and, sampled, its own gap: each number, each action, or the executed chunk."""

    def problems(self, config: VLAConfig) -> Iterator[Finding]:
        """Rewards that nothing is compared with, shards, and steps that another policy does."""
        yield from super().problems(config)
        if self.reward_coef and config.environment.group_size < 2:
            yield ("environment.group_size", "trainer.reward_coef"), "rewards are compared in groups; write 2 or more"
        if config.distributed.fsdp:
            yield ("distributed.fsdp", "trainer.algorithm"), "the teacher is not in shards; write false"
        if config.sampler.first_steps:
            text = "the first steps would stay those of the policy before training; train all of them"
            yield ("sampler.ft_denoising_steps", "trainer.algorithm"), text
