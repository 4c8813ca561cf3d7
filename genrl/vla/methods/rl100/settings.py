"""RL-100 (arXiv 2510.14830): its keys, what it refuses, what it logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Margin, Share, Whole
from genrl.vla.config.schema import Row, VLAMethod
from genrl.vla.methods.settings import FROM_DATA, from_demonstrations

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


DECAYED = "it would move the encoder, which rl100 freezes after imitation; write 0"


class RL100(VLAMethod):
    """RL-100: imitation, rounds of offline RL that offline evaluation gates, online RL, a one-step copy at the end."""

    title: ClassVar[str] = "RL-100"
    one_process: ClassVar[bool] = True
    takes = frozenset({"actors"})
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "data/transitions": MetricDoc(
            "decisions in the data set so far", "Grows by what every round collects.", "decisions"
        ),
        "dynamics/loss": MetricDoc(
            "squared error of the change, of states and of what a frozen encoder sees, in units of its spread, plus "
            "the cross-entropy of an end; last 50 steps",
            "Near 1: the model knows nothing, and the gate is blind.",
        ),
        "gate/accepted": MetricDoc(
            "candidates of the round that offline evaluation admitted: the trust region moved to them",
            "0: nothing the round did is kept.",
            "candidates",
        ),
        "gate/refused": MetricDoc(
            "candidates of the round that it refused",
            "Many: lower the learning rate, or the critics are exhausted.",
            "candidates",
        ),
        "gate/value": MetricDoc(
            "mean imagined Q of the policy that the round ends with",
            "Comparable within a round only: the critics change.",
            "returns",
        ),
        "gate/gain": MetricDoc(
            "`gate/value` minus that of the policy the round began with",
            "If it rises while `eval/success_mean` falls, the policy exploits the critics.",
            "returns",
        ),
        "distil/error": MetricDoc(
            "mean square of the one-step copy's chunk minus the teacher's from the same noise; last 50 steps",
            "Small beside 1, the spread of noise.",
            "squared policy units",
        ),
        "distil/success_mean": MetricDoc(
            "success of the one-step copy on the evaluation's episodes",
            "Compare with `eval/success_mean` of the same iteration.",
            "share 0..1",
        ),
        "timing/critics_s": MetricDoc("seconds of learning critics and model", "Offline learning.", "s", False),
    }

    algorithm: Literal["rl100"] = "rl100"
    """Which trainer."""
    imitation_steps: Count = 300
    """Steps of imitation that a new policy begins with."""
    rounds: Count = 4
    """Iterations of offline RL; those after them are online."""
    episodes: Count = 3072
    """Episodes that are collected before the first round and after each; a multiple of environment.num_envs."""
    critic_steps: Count = 1500
    """Steps in a round of the critics, which judge actions."""
    dynamics_steps: Count = 800
    """Steps of the model in which policies are judged, new in every round."""
    steps_per_iteration: Count = 200
    """Batches of a round; each is a step for every sampled denoising step (RL-100: 8000 over all)."""
    batch_size: Count = 256
    """States of the data in a batch (RL-100: 128 to 512)."""
    clip_range: Margin = 0.25
    """Ratio of a denoising step kept in 1 - c .. 1 + c (RL-100: 0.25)."""
    clip_decay: Share = 0.99
    """Factor on it after each of the first 200 batches of a round (RL-100: 0.96)."""
    gate_every: Count = 50
    """Batches between two judgements of the candidate (RL-100: 50)."""
    union_steps: Whole = 300
    """Steps of the imitation that ends a round, of the episodes so far that succeeded (of all, where nothing is said of
    success); 0 = none."""
    lam: Share = 0.95
    """Lambda of generalised advantage estimation online."""
    distil_steps: Whole = 1500
    """Steps that make the one-step copy at the end; 0 = none."""

    def problems(self, config: VLAConfig) -> Iterator[Finding]:
        """A sampler that does not score every denoising step, a frozen encoder, or a new policy without
        demonstrations."""
        sampler, policy = config.sampler, config.policy
        if policy.new is not None:
            yield from from_demonstrations(config, self.algorithm)
        if sampler.kind in ("flow_noise", "reinflow"):
            text = f"rl100 needs a ratio for every denoising step, {sampler.kind} has one for the chain; write flow_cps"
            yield ("sampler.kind",), text
        if sampler.kind in ("flow_sde", "flow_cps") and sampler.selection != "all":
            yield ("sampler.selection",), "rl100 trains on all denoising steps of a chunk; write all"
        if sampler.kind == "diffusion" and sampler.ft_denoising_steps != sampler.steps:
            yield ("sampler.ft_denoising_steps",), "rl100 trains all denoising steps; write as many as steps"
        if config.ema is not None:
            text = "the average would begin before imitation, and follow candidates that the gate refuses; write null"
            yield ("ema", "trainer.algorithm"), text
        if policy.new is not None and policy.new.looks and config.optimizer.weight_decay:
            yield ("optimizer.weight_decay", "policy.new"), DECAYED
        if policy.frozen:
            yield ("policy.freeze",), "rl100 trains the whole policy, and freezes by itself what looks; write nothing"

    def plan(self, config: VLAConfig, chunk: int | None) -> list[Row]:
        """Nothing: the rounds differ too much for one number."""
        return [FROM_DATA]
