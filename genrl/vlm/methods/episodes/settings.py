"""Agents: PPO over the tokens of their answers with a critic (VL-DAC, POAD), or GRPO and its family over groups of
episodes that begin alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Positive, Section, Whole
from genrl.vlm.config.metrics import ACTED
from genrl.vlm.config.schema import Row, Shared, sampled
from genrl.vlm.recipe.advantages import CriticAdvantage
from genrl.vlm.recipe.losses import ValueLoss
from genrl.vlm.recipe.method import RecipeMethod
from genrl.vlm.recipe.preset import Preset

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig

OF_QUESTIONS = {"masked_image", "degraded", "ema", "divergence", "scores", "components", "draw", "greedy", "task"}
OF_QUESTIONS |= {"right", "proxy", "reference_probability", "ids"}
"""What only answers to questions have (`Choice.tensors`)."""


class Critic(Section):
    """The value function of vl_dac, poad, token_ppo and ma_rlhf: a small network on the language model's last state,
    which it does not train."""

    hidden: Annotated[tuple[Count, ...], Field(min_length=1)] = (3072, 2048)
    """Widths of its hidden layers (VL-DAC: 3072 and 2048)."""
    lr: Positive = 1e-4
    """Its learning rate; the schedule is the optimiser's."""
    warmup: Whole | None = None
    """Iterations at the start that train nothing but the critic; null = the method's (vl_dac: 2, others: 0)."""
    kl_stop: Positive | None = None
    """Leave an iteration's updates once the mean of l_old - l exceeds this; null = the method's (vl_dac: never,
    others: .02)."""


class Episodes(RecipeMethod):
    """Episodes in an environment: a published method by name, and your changes to it."""

    learns_from = "episodes"
    takes = frozenset({"older_samples"})
    title: ClassVar[str] = "Vision-language agents"
    metrics: ClassVar[Mapping[str, MetricDoc]] = ACTED

    algorithm: Literal["episodes"] = "episodes"
    """Which method."""
    critic: Critic | None = None
    """The value function of vl_dac, poad, token_ppo and ma_rlhf; null = as its defaults."""

    critic_class: ClassVar[str] = "genrl.vlm.episodes.critic:ValueHead"

    @property
    def with_critic(self) -> bool:
        """Whether a value function says what a step is worth, instead of the group."""
        return isinstance(self.composed.advantage, CriticAdvantage)

    def shared(self, config: VLMConfig) -> Shared:
        assert config.environment is not None
        if self.with_critic:
            return Shared("environment.parallel", config.environment.parallel)
        return super().shared(config)

    def iteration(self, config: VLMConfig) -> Iterator[Row]:
        place, starts, size = config.environment, config.generation.prompts_per_iteration, config.generation.group_size
        assert place is not None
        if self.with_critic:
            amount = f"{place.parallel} episodes side by side x {place.steps}, {place.name}"
            yield from sampled(config, "steps", place.parallel * place.steps, amount)
        else:
            yield from sampled(config, "episodes", starts * size, f"{starts} starts x {size}, {place.name}")
        yield from self.learned(config)

    def refused(self, config: VLMConfig, preset: Preset) -> Iterator[Finding]:
        yield from super().refused(config, preset)
        advantage, lacks = preset.advantage, sorted(preset.reads & OF_QUESTIONS)
        critic = isinstance(advantage, CriticAdvantage)
        if lacks:
            text = f"{self.preset} reads what only questions have ({lacks[0]}), not episodes; nearest: grpo"
            yield ("trainer.preset",), text
        if critic != any(isinstance(regulariser, ValueLoss) for regulariser in preset.regularisers):
            text = (
                "a critic's advantage and its loss go together: advantage {name: critic} and regulariser {name: value}"
            )
            yield (self.key("regularisers"),), text
        if isinstance(advantage, CriticAdvantage) and advantage.level == "step" and advantage.macro > 1:
            text = "macro actions are of tokens, and a step has one value; write level: token, or leave macro out"
            yield (self.key("advantage"),), text
        if self.critic is not None and not critic:
            yield ("trainer.critic", "trainer.preset"), f"{self.preset} has no critic; leave it out, or write vl_dac"
        if critic and config.generation.staleness:
            text = "values and episodes that go on are of the present weights; write 0, or a method of groups"
            yield ("trainer.preset", "generation.staleness"), text
        place = config.environment
        if place is not None and critic and self.updates > place.parallel * place.steps:
            yield ("trainer.updates", "environment.steps"), "an update needs a step; write fewer updates or more steps"
        if not critic and self.updates > config.generation.prompts_per_iteration:
            text = f"{self.updates} updates need a group each; there are {config.generation.prompts_per_iteration}"
            yield ("trainer.updates", "generation.prompts_per_iteration"), text
