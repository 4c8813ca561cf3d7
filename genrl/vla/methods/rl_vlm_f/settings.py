"""Rewards from preferences over pictures, RL-VLM-F (arXiv 2402.03681): its keys, what it refuses, what it logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import genrl_rewards
from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, NonNegative, Section, Text
from genrl.config.sections import Waiting
from genrl.vla.config.schema import Row, VLAMethod
from genrl.vla.methods.settings import FROM_DATA, on_the_table

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


class Labels(Section):
    """Who says which of two pictures is nearer to the goal, and which pairs it is asked about."""

    judge: Text = "table_progress"
    """A reward by name, or path/file.py:Name; pairwise ones are asked in both orders."""
    args: dict[str, Any] = {}
    """Its options."""
    remote: Text | None = None
    """URL of a `genrl serve` of this judge, which is then not loaded here; null = none. Its token is taken from the
    environment variable GENRL_REWARD_TOKEN."""
    outage: Waiting = Waiting()
    """How long is waited for that server before the run stops."""
    batch_size: Count = 16
    """Pairs of a call; their answers are then in the cache."""
    margin: NonNegative = 0.05
    """Scores nearer than this are no preference, and the pair is dropped."""
    image_size: Count = 32
    """Side of the pictures that it is shown."""
    rounds: Count = 4
    """Times that pairs are asked for and the reward networks are trained."""
    pairs: Count = 1000
    """Pairs of a round: after the first one those of ten times as many that the networks disagree on most."""
    steps: Count = 300
    """Steps of the networks' training in a round."""
    cache: Text | None = None
    """File with answers by the hash of what was shown, the judge and its options; null = labels.jsonl of the run
    folder. A file of its own for every model that a remote judge may be."""


class RLVLMF(VLAMethod):
    """Rewards by preferences over pictures for data without any, then implicit Q-learning on them."""

    title: ClassVar[str] = "RL-VLM-F"
    one_process: ClassVar[bool] = True
    imitates = "never"
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "data/advantage_gap": MetricDoc(
            "mean advantage of the data's actions in episodes that succeeded minus that in the others",
            "Positive: learned rewards and critics tell them apart, though nobody told them of success.",
        ),
        "labels/pairs": MetricDoc(
            "pairs that were asked about, dropped ones included", "The cost of labelling.", "pairs"
        ),
        "labels/asked": MetricDoc(
            "of these, how many the judge was asked; the cache knew the others",
            "0 in a run that repeats another one.",
            "pairs",
        ),
        "labels/dropped": MetricDoc(
            "share of pairs without a preference (-1), unusable answers among them",
            "High: raise the difference between frames, or lower the margin.",
            "share 0..1",
        ),
        "labels/unusable": MetricDoc(
            "share of pairs about which the judge gave no answer that can be read, in one of both orders, or failed",
            "Above some hundredths: the model does not keep to the form of the answer; change its question.",
            "share 0..1",
        ),
        "labels/loss": MetricDoc(
            "Bradley-Terry loss of the reward networks; mean over the last round", "Below ln 2.", "nats"
        ),
        "labels/accuracy": MetricDoc(
            "share of training pairs that the reward networks order as the judge does; last round",
            "Near 1 with a consistent judge.",
            "share 0..1",
        ),
    }

    algorithm: Literal["rl_vlm_f"] = "rl_vlm_f"
    """Which trainer."""
    episodes: Count = 2500
    """Episodes of the data: a player who does what it is told in 35 % of them."""
    labels: Labels = Labels()
    """The judge and the reward networks."""
    critic_steps: Count = 1500
    """Steps of the critics before the policy's."""
    temperature: NonNegative = 30.0
    """Weight of a data action in the policy's regression: exp of so many times its advantage; 0 = plain cloning."""
    steps_per_iteration: Count = 250
    """Steps of the policy in an iteration."""
    batch_size: Count = 256
    """Transitions per step."""

    def problems(self, config: VLAConfig) -> Iterator[Finding]:
        """Anything but a new policy on MiniTable, and a judge that does not exist or cannot judge its pictures."""
        yield from on_the_table(config, self.algorithm)
        labels = self.labels
        if labels.remote is not None:
            if labels.args:
                yield ("trainer.labels.args",), f"{labels.judge} is remote; give them to its server (--arg)"
            return
        try:
            columns = genrl_rewards.declaration(genrl_rewards.resolve(labels.judge)).columns
        except ValueError as error:
            yield ("trainer.labels.judge",), str(error)
            return
        if columns:
            text = f"{labels.judge} asks for {', '.join(columns)}; here are pictures and instructions alone"
            yield ("trainer.labels.judge",), text

    def plan(self, config: VLAConfig, chunk: int | None) -> list[Row]:
        """Nothing that an environment does; what the judge is asked at most, once."""
        pairs = self.labels.pairs * self.labels.rounds
        return [FROM_DATA, ("labels", f"{pairs:,}", "pairs of pictures, before the first iteration")]
