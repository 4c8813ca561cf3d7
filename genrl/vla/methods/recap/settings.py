"""RECAP (pi*0.6, arXiv 2511.14759): its keys, what it refuses, what it logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Fraction, Share, Text
from genrl.vla.config.names import WORLDS
from genrl.vla.config.schema import Row, VLAMethod
from genrl.vla.methods.settings import FROM_DATA

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


class RECAP(VLAMethod):
    """Imitation of data with successes and failures, told which of its actions are better than usual."""

    title: ClassVar[str] = "RECAP"
    one_process: ClassVar[bool] = True
    imitates = "never"
    trains: ClassVar[tuple[str, ...]] = ("velocity", "tokens")
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "data/positive": MetricDoc(
            "share of the data's steps whose advantage is positive: at or above the threshold",
            "About `trainer.positive`. 0 or 1: the values say nothing, every step has the same advantage.",
            "share 0..1",
        ),
        "data/positive_gap": MetricDoc(
            "share of positive steps in episodes that succeeded minus that in the others",
            "Above 0: the values tell good episodes from bad ones.",
            "share",
        ),
        "value/loss": MetricDoc(
            "cross-entropy of the predicted distribution and the return, mean over all steps",
            "Below ln(201), which knows nothing.",
            "nats",
        ),
        "value/accuracy": MetricDoc(
            "share of steps whose predicted value is within a bin of the return",
            "Rises with trainer.critic_steps.",
            "share 0..1",
        ),
    }

    bins: ClassVar[int] = 201
    """Values between -1 and 0 that the critic chooses among (RECAP: 201)."""

    algorithm: Literal["recap"] = "recap"
    """Which trainer."""
    episodes: Count = 1000
    """Episodes of the embedded table's data, a player who does what it is told in half of them; of a data set, all."""
    outcome: Text = "next.success"
    """Column of demonstrations.dataset that is above 0 in some frame of an episode that succeeded (next.reward)."""
    fail: Count | None = None
    """What a failure costs, in steps; null = as many as the longest episode has (RLinf: 300)."""
    horizon: Count = 10
    """Steps that an advantage looks ahead: frames of a data set, decisions on the table (RLinf: 10; paper: 50)."""
    positive: Share = 0.3
    """Share of the steps that are held to be better than usual; 1 = supervised training on all of them."""
    drop: Fraction = 0.1
    """Share of the steps, drawn in every iteration, of which the policy is not told how good they are (RLinf: .1)."""
    critic_steps: Count = 1000
    """Steps of the critic, on what the policy sees, before the policy's."""
    steps_per_iteration: Count = 250
    """Steps of the policy in an iteration."""
    batch_size: Count = 256
    """Steps of the data in an optimiser step."""

    def critic_values(self, horizon: int) -> int:
        """See `VLAMethod`."""
        return self.bins

    def problems(self, config: VLAConfig) -> Iterator[Finding]:
        """Data that are missing, and a new policy whose encoder sees nothing yet."""
        shown, new = config.demonstrations, config.policy.new
        if config.environment.name not in WORLDS.built_in and (shown is None or shown.dataset is None):
            yield ("demonstrations.dataset",), "recap learns from data with successes and failures; write its folder"
        if shown is not None and shown.expert is not None:
            yield ("demonstrations.expert",), "an expert only succeeds; write null, and a dataset"
        if new is not None and new.looks:
            text = "the critic reads what the policy's encoder sees, and that of a new one sees nothing yet"
            yield ("policy.new",), f"{text}; write image_size: 0 and points: 0, or begin with a policy's folder"

    def plan(self, config: VLAConfig, chunk: int | None) -> list[Row]:
        """Nothing that an environment does."""
        return [FROM_DATA]
