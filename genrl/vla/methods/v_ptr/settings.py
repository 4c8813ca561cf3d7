"""V-PTR (arXiv 2309.13041): its keys, what it refuses, what it logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, NonNegative
from genrl.vla.config.names import EMBEDDED, WORLDS
from genrl.vla.config.schema import Row, VLAMethod
from genrl.vla.methods.settings import FROM_DATA

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


class VPTR(VLAMethod):
    """Value functions of videos, and then offline reinforcement learning with their picture encoder."""

    title: ClassVar[str] = "V-PTR"
    one_process: ClassVar[bool] = True
    imitates = "never"
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

    videos: ClassVar[int] = 400
    """Videos of play, of 41 frames: no actions, no rewards, no instructions."""
    pretraining_steps: ClassVar[int] = 300
    """Steps that the encoder learns for, by videos or by imitation."""

    algorithm: Literal["v_ptr"] = "v_ptr"
    """Which trainer."""
    encoder: Literal["video", "imitation", "random"] = "video"
    """What the picture encoder has learned before: values of videos, to imitate the robot's data, or nothing."""
    episodes: Count = 400
    """Episodes of the robot's data: a player who does what it is told in half of them."""
    critic_steps: Count = 600
    """Steps of the critics, on the features of the encoder, which they do not train, before the policy's."""
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
