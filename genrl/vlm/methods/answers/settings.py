"""Policy gradients over groups of answers to questions: GRPO and the published methods of its family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Whole
from genrl.vlm.config.schema import GroupFilter
from genrl.vlm.recipe.advantages import CriticAdvantage, SemiOnline, TurnLeaveOneOut
from genrl.vlm.recipe.losses import ValueLoss
from genrl.vlm.recipe.method import RecipeMethod
from genrl.vlm.recipe.preset import Preset

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig


class Answers(RecipeMethod):
    """Groups of answers to questions, scored by the rewards: a published method by name, and your changes to it."""

    title: ClassVar[str] = "Methods over groups of answers"
    takes = frozenset({"older_samples", "part_of_groups", "rescued"})
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "sampler/gap_max": MetricDoc(
            "its largest value; where the log-probabilities before the update have a pass of their own",
            "As `sampler/gap_mean`.",
            "nats",
        ),
        "sampler/gap_k3": MetricDoc(
            "mean over tokens of exp(d) - d - 1, d = log-prob of the trainer - log-prob of the sampler: estimates the "
            "KL from the sampler's distribution to the trainer's",
            "Beside `kl` and the clip range: how far off the policy that sampled is.",
            "nats",
        ),
        "sampler/corrected": MetricDoc(
            "tokens whose importance weight the limits of `engine_mismatch` changed / tokens",
            "Near 0. High: sampler and trainer differ too much for the correction; find out why.",
            "share 0..1",
        ),
        "entropy/sampled": MetricDoc(
            "mean of -log-prob over the tokens of the answers; mean over updates",
            "How much is still tried out. Below 0.05 while answers are wrong: lower the learning rate.",
            "nats",
        ),
        "entropy/policy": MetricDoc(
            "mean entropy of the distributions that the tokens of the answers were sampled from; mean over updates",
            "As `entropy/sampled`, without its noise.",
            "nats",
        ),
        "ratio/drift": MetricDoc(
            "mean of (log-prob when sampled - log-prob now) over the tokens, before each update; mean over updates",
            "Estimates how far the updates of an iteration have moved (KL of old to new). POAD stops at 0.02.",
            "nats",
        ),
        "ratio/max": MetricDoc(
            "largest ratio of a token (or answer); mean over updates",
            "1 in the first update. Far above the clip range: fewer updates per iteration, or a lower rate.",
        ),
        "loss/kl": MetricDoc("the KL term of `loss`, weight included; mean over updates", "As `kl`."),
        "loss/entropy_penalty": MetricDoc(
            "the entropy term of `loss`, weight included", "VPPO: falls as `entropy/sampled`."
        ),
        "loss/entropy_bonus": MetricDoc(
            "the bonus for entropy in `loss`, weight included", "POAD: as -`entropy/policy`."
        ),
        "loss/entropy_band": MetricDoc("the entropy band of `loss`, weight included", "0 inside of the band."),
        "loss/perception": MetricDoc(
            "the perception term of `loss`, weights included (Q-Hawkeye)",
            "Falls as answers depend on the picture's quality.",
        ),
        "timing/estimate_s": MetricDoc(
            "seconds of the forward passes before an update: old, reference and further log-probabilities",
            "About a third of `timing/train_s` for each.",
            "s",
            False,
        ),
    }

    algorithm: Literal["answers"] = "answers"
    """Which method."""
    filter: Literal["none", "spread", "not_all_right"] = "none"
    """Groups that are trained on: all; those with two different rewards (DAPO); all but those whose first reward is
    always 1 (NGRPO)."""
    resample: Whole = 0
    """Most further rounds of sampling while `filter` leaves too few groups (DAPO); 0 = train on what is left."""

    @property
    def group_filter(self) -> GroupFilter:
        return GroupFilter(self.filter, 1 + self.resample)

    def refused(self, config: VLMConfig, preset: Preset) -> Iterator[Finding]:
        if isinstance(preset.advantage, CriticAdvantage):
            text = "a critic learns from episodes: write environment in place of task; nearest here: grpo"
            yield (self.key("advantage"), "task"), text
            return
        if isinstance(preset.advantage, SemiOnline | TurnLeaveOneOut):
            text = "turns are of episodes: write environment in place of task; nearest here: grpo"
            yield (self.key("advantage"), "task"), text
            return
        yield from super().refused(config, preset)
        if any(isinstance(regulariser, ValueLoss) for regulariser in preset.regularisers):
            yield (self.key("regularisers"),), "answers to questions have no critic; leave out {name: value}"
        if self.updates > config.generation.prompts_per_iteration:
            text = f"{self.updates} updates need a group each; there are {config.generation.prompts_per_iteration}"
            yield ("trainer.updates", "generation.prompts_per_iteration"), text
        if self.resample and self.filter == "none":
            yield ("trainer.resample", "trainer.filter"), "without a filter no group is missing; write filter: spread"
        if config.generation.group_size < 2 and self.filter == "spread":
            yield ("trainer.filter", "generation.group_size"), "one answer has no spread; write 2 or more (8 is usual)"
