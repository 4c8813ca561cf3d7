"""V-PTR (arXiv 2309.13041): its keys, what it refuses, what it logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, NonNegative, Positive, Section, Share, Ways
from genrl.vla.config.names import EMBEDDED, WORLDS
from genrl.vla.config.schema import Row, VLAMethod
from genrl.vla.offline.settings import FROM_DATA, Critics

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


class Pretraining(Section):
    """The value function of videos."""

    videos: Ways = 400
    """Videos of play: no actions, no rewards, no instructions."""
    length: Ways = 40
    """Actions between the first and the last frame of a video."""
    steps: Count = 300
    """Steps, of the imitation with encoder: imitation, too."""
    batch_size: Count = 48
    """Pairs of neighbouring frames per step; frames of the imitation."""
    lr: Positive = 1e-3
    """Learning rate."""
    discount: Share = 0.9
    """Discount of an action (ICVF: 0.99)."""
    expectile: Share = 0.9
    """Weight of steps towards the intent; that of others is what is missing to 1 (ICVF: 0.9)."""
    target_rate: Share = 0.02
    """How fast the slow copy follows in a step (ICVF: 0.005, for a hundred times the steps)."""


class VPTR(VLAMethod):
    """Value functions of videos, and then offline reinforcement learning with their picture encoder."""

    title: ClassVar[str] = "V-PTR"
    one_process: ClassVar[bool] = True
    makes_policy: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "pretraining/loss": MetricDoc(
            "mean of ICVF's loss over the last 50 steps (with encoder: imitation, of flow or noise matching)",
            "Falls. Large values of goals that are far make it large.",
        ),
        "pretraining/order": MetricDoc(
            "share of videos in whose middle their last frame is worth more than at their beginning, V(s, g, g)",
            "0.5 before training, near 1 where the values tell how near a goal is.",
            "share 0..1",
        ),
        "critic/advantage_gap": MetricDoc(
            "mean advantage of the data's actions in episodes that succeeded minus that in the others",
            "Positive: the critics tell them apart on the features of the encoder.",
        ),
    }

    algorithm: Literal["v_ptr"] = "v_ptr"
    """Which trainer."""
    encoder: Literal["video", "imitation", "random"] = "video"
    """What the picture encoder has learned before: values of videos, to imitate the robot's data, or nothing."""
    pretraining: Pretraining = Pretraining()
    """Of the encoder."""
    episodes: Count = 400
    """Episodes of the robot's data: a player who often does something else than it is told."""
    right: Share = 0.5
    """Share of them in which it does what it is told."""
    critics: Critics = Critics(gamma=0.97, batch_size=128)
    """On the features of the encoder, which they do not train."""
    critic_steps: Count = 600
    """Steps of the critics before the policy's."""
    temperature: NonNegative = 10.0
    """Weight of a data action in the policy's regression: exp of so many times its advantage; 0 = plain cloning."""
    steps_per_iteration: Count = 150
    """Steps of the policy, which trains its encoder on, in an iteration."""
    batch_size: Count = 64
    """Transitions per step."""

    def problems(self, config: VLAConfig) -> Iterator[Finding]:
        """Anything but a new policy that looks at MiniTable."""
        if config.environment.name not in WORLDS.built_in:
            yield ("environment.name",), f"v_ptr makes its videos itself; write {' or '.join(WORLDS.built_in)}"
        if config.policy.new is None:
            yield ("policy.new",), "v_ptr begins with a new policy; write `new: {...}`"
        elif config.policy.new.type not in EMBEDDED:
            text = f"v_ptr pre-trains the picture encoder of embedded policies; write {' or '.join(EMBEDDED)}"
            yield ("policy.new.type",), text
        elif not config.policy.new.image_size:
            yield ("policy.new.image_size",), "v_ptr pre-trains what looks at pictures; write 32"
        elif config.policy.new.points:
            yield ("policy.new.points",), "v_ptr pre-trains what looks at pictures; write 0"
        if config.demonstrations is not None:
            yield ("demonstrations",), "v_ptr makes its own data; take them out"

    def plan(self, config: VLAConfig, chunk: int | None) -> list[Row]:
        """Nothing that an environment does."""
        return [FROM_DATA]
