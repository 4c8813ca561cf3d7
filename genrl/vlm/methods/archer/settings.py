"""ArCHer (arXiv 2402.19446): a critic of whole utterances that learns off policy, and a policy gradient over tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Positive, Section, Share, Whole
from genrl.vlm.config.metrics import ACTED
from genrl.vlm.config.schema import Row, Shared, VLMMethod, sampled

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig


class UtteranceCritic(Section):
    """Its two pairs of Q and V: networks on the language model's last states, which they do not train."""

    follow: ClassVar[float] = 0.1
    """Share by which their slow copies come nearer in each step."""

    hidden: Annotated[tuple[Count, ...], Field(min_length=1)] = (768, 768)
    """Widths of their hidden layers (its code: 768 and 768)."""
    lr: Positive = 1e-3
    """Their learning rate; the schedule is the optimiser's."""
    updates: Count = 20
    """Steps of an iteration."""
    warmup: Whole = 2
    """Iterations at the start that train nothing else."""


class ArCHer(VLMMethod):
    """ArCHer: a critic of whole utterances that learns off policy, and a policy gradient over tokens."""

    learns_from = "episodes"
    title: ClassVar[str] = "ArCHer"
    critic_class: ClassVar[str] = "genrl.vlm.methods.archer.train:UtteranceCritic"
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        **ACTED,
        "loss/q": MetricDoc(
            "mean square of what Q of a stored turn is off its target, summed over both critics",
            "Falls, and rises for a while where new turns are paid unlike those before.",
        ),
        "loss/v": MetricDoc(
            "mean square of what V is off the slow Q of what the policy says now, summed over both critics",
            "As `loss/q`.",
        ),
        "critic/turns": MetricDoc("turns in the memory", "Rises to `trainer.memory`.", "turns"),
    }

    algorithm: Literal["archer"] = "archer"
    """Which method."""
    critic: UtteranceCritic = UtteranceCritic()
    """The critic."""
    memory: Count = 4096
    """Turns that are kept to learn from, of all processes."""
    batch_size: Count = 64
    """Turns of a step, of the critic's and of the policy's, over all processes."""
    updates: Count = 1
    """Steps of the policy in an iteration; before each, its utterances are sampled anew."""
    gamma: Share = 0.9
    """Discount per turn (its code: .9)."""

    @property
    def with_critic(self) -> bool:
        """Whether a value function says what a step is worth."""
        return True

    def shared(self, config: VLMConfig) -> Shared:
        assert config.environment is not None
        return Shared("environment.parallel", config.environment.parallel, ("trainer.batch_size", self.batch_size))

    def iteration(self, config: VLMConfig) -> Iterator[Row]:
        place = config.environment
        assert place is not None
        remark = f"{place.parallel} episodes x {place.steps}, {place.name}"
        yield from sampled(config, "steps", place.parallel * place.steps, remark)
        number = self.critic.updates + self.updates
        yield "updates", f"{number:,}", f"{self.critic.updates} of the critic, {self.batch_size} turns each"
        yield "further answers", f"{number * self.batch_size:,}", "what the policy says now, to remembered turns"

    def problems(self, config: VLMConfig) -> Iterator[Finding]:
        if config.distributed.fsdp:
            yield ("distributed.fsdp", "trainer.algorithm"), "archer was not tried in shards; write false"
        if config.generation.vllm is not None:
            text = "the model itself answers remembered turns, whose pictures vLLM would need; write null"
            yield ("generation.vllm", "trainer.algorithm"), text
        if self.fit_batch:
            yield ("trainer.fit_batch",), "its passes have trainer.batch_size turns; write a smaller batch, and false"
