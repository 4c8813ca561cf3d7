"""What is added to rewards before they become advantages, and steps from advantages to advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.section import Count, Flag, NonNegative, Number, Positive, Share, Whole
from genrl.vlm.recipe import Choice, lazily

if TYPE_CHECKING:
    from torch import Tensor

    from genrl.objectives import token_advantages, token_regularisers, token_weights
    from genrl.objectives import tokens as masking
    from genrl.vlm.rollout.token_batch import TokenBatch
else:
    token_regularisers = lazily("genrl.objectives.token_regularisers")
    token_advantages = lazily("genrl.objectives.token_advantages")
    token_weights = lazily("genrl.objectives.token_weights")
    masking = lazily("genrl.objectives.tokens")


class Term(Choice):
    """What is added to rewards before they become advantages."""

    def reward(self, batch: TokenBatch) -> Tensor:
        """[B], to add to the rewards of completions."""
        raise NotImplementedError


class OverlongPenalty(Term):
    """From 0 down to -1 over the last tokens allowed: DAPO (`token_regularisers.overlong_penalty`)."""

    name: Literal["overlong"] = "overlong"
    maximum: Count
    """Tokens at which it is -1 (DAPO: 20480)."""
    buffer: Count
    """Tokens before that at which it is 0 (DAPO: 4096)."""

    def reward(self, batch: TokenBatch) -> Tensor:
        return token_regularisers.overlong_penalty(
            masking.token_count(batch.mask), maximum=self.maximum, buffer=self.buffer
        )


class ConsistencyBonus(Term):
    """For right answers that a moving average of the model finds likely after the reasoning: GRPO-CARE
    (`token_regularisers.consistency_bonus` of [accuracy] [B], [ema] and [answer_mask])."""

    average: ClassVar[tuple[float, int]] = 0.995, 10
    """Share of the average that an update keeps, and optimiser steps between updates."""
    tensors = ("ema",)
    name: Literal["consistency"] = "consistency"
    coefficient: Number = 0.5
    """Bonus of an accuracy of 1."""

    def reward(self, batch: TokenBatch) -> Tensor:
        likely, answer, accuracy = (batch.read(name, self.name) for name in ("ema", "answer_mask", "accuracy"))
        confidence = token_regularisers.answer_confidence(likely, answer)
        return token_regularisers.consistency_bonus(accuracy, confidence, batch.group, coefficient=self.coefficient)


class ReferenceProbability(Term):
    """How likely the right answer is after the reasoning, the mean over its tokens of their probability: RLPR (arXiv
    2506.18254; [reference_probability] [B, 2], after the row's own reasoning and after none). Column `answer`."""

    tensors = ("reference_probability",)
    name: Literal["reference_probability"] = "reference_probability"
    coefficient: Number = 0.9
    """Factor (RLPR: .9, beside .1 of the form)."""
    baseline: Flag = True
    """Less how likely it is without reasoning, at least 0."""

    def reward(self, batch: TokenBatch) -> Tensor:
        likely = batch.read("reference_probability", self.name)
        return self.coefficient * ((likely[:, 0] - likely[:, 1]).clamp(min=0) if self.baseline else likely[:, 0])


class KlInReward(Term):
    """`-beta (l_old - l_ref)`: per token for whitened_returns, else summed over the row."""

    tensors = ("ref", "old")
    name: Literal["kl_in_reward"] = "kl_in_reward"
    beta: NonNegative
    """Weight (RLOO in TRL: .05, REINFORCE++ in OpenRLHF: .01)."""

    def reward(self, batch: TokenBatch) -> Tensor:
        old, reference = (batch.read(name, self.name) for name in ("old_log_prob", "ref_log_prob"))
        return -self.beta * masking.sequence_log_ratio(old, reference, batch.mask)

    def token_reward(self, batch: TokenBatch) -> Tensor:
        """[B, T], for estimators that discount over tokens."""
        old, reference = (batch.read(name, self.name) for name in ("old_log_prob", "ref_log_prob"))
        return token_regularisers.with_kl(old.new_zeros(old.shape).double(), old, reference, batch.mask, beta=self.beta)


RewardTerm = OverlongPenalty | ConsistencyBonus | ReferenceProbability | KlInReward

# --- transforms of advantages, in order


class Change(Choice):
    """A step from advantages to advantages."""

    def changed(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """Advantages of the same shape. A row without a score has NaN, which its statistics leave out."""
        raise NotImplementedError


class BatchNormalise(Change):
    """z-scores over the batch (`token_advantages.batch_normalised`)."""

    name: Literal["batch_normalise"] = "batch_normalise"

    def changed(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        return token_advantages.batch_normalised(advantage, batch.mask if advantage.dim() == 2 else None)


class SigmaFilter(Change):
    """Advantages far from the mean become 0: StableReinforce (`token_advantages.sigma_filtered`)."""

    name: Literal["sigma_filter"] = "sigma_filter"
    limit: NonNegative = 3.0
    """Standard deviations that are kept."""

    def changed(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        return token_advantages.sigma_filtered(advantage, limit=self.limit)


class Uncertainty(Change):
    """Times `exp(-0.2 u)`, u the scatter of the scores from 1 to 5 that a group wrote, [scores] [B]: Q-Hawkeye
    (`token_advantages.score_uncertainty`)."""

    tensors = ("scores",)
    name: Literal["uncertainty"] = "uncertainty"

    def changed(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        scatter = token_advantages.score_uncertainty(batch.read("scores", self.name), batch.group)
        return token_advantages.scaled(advantage, (-0.2 * scatter).exp(), batch.mask)


class TrajectoryDependency(Change):
    """Times a factor, .9 or more, that grows with how much an answer depends on its picture, [masked_image]: VPPO
    (`token_advantages.trajectory_weight`)."""

    tensors = ("masked_image", "old")
    name: Literal["trajectory_dependency"] = "trajectory_dependency"

    def changed(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        old, blind = (batch.read(name, self.name) for name in ("old_log_prob", "masked_image"))
        return token_advantages.scaled(
            advantage,
            token_advantages.trajectory_weight(token_weights.visual_dependency(old, blind, batch.mask), batch.mask),
            batch.mask,
        )


class ClampAdvantage(Change):
    """No larger than a limit on either side."""

    name: Literal["clamp"] = "clamp"
    limit: NonNegative
    """Largest absolute advantage."""

    def changed(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        return advantage.clamp(-self.limit, self.limit)


class InformativeGroups(Change):
    """Times rows / rows of groups that have spread: GPG (`token_advantages.informative_factor`)."""

    name: Literal["informative_groups"] = "informative_groups"

    def changed(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        rows = advantage if advantage.dim() == 1 else masking.masked(advantage, batch.mask).abs().sum(1)
        return advantage * token_advantages.informative_factor(rows, batch.group)


class SpreadFilter(Change):
    """Groups whose rewards, terms included, spread far less than is usual in the run are left out: RLPR
    (`token_advantages.wide_groups`). The average is part of a checkpoint."""

    entry: ClassVar[str] = "spread of rewards"
    """Under which it is kept beside the statistics of prompts."""
    name: Literal["spread_filter"] = "spread_filter"
    share: NonNegative = 0.5
    """Share of the moving average of the mean deviation that a group's needs."""
    decay: Share = 0.99
    """Share of the average that an iteration keeps."""
    after: Whole = 10
    """Iterations before any group is left out (RLPR: 6 to 11 by script)."""

    def changed(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        if batch.prompts is None:
            raise ValueError("the filter by spread keeps an average over iterations: give estimate(..., prompts=...)")
        seen, average, _ = batch.visits.get(self.entry, (0, None, 0.0))
        wide, average = token_advantages.wide_groups(
            batch.scores(self.name), batch.group, average, share=self.share, decay=self.decay
        )
        batch.visits[self.entry] = (seen + 1, average, 0.0)
        if seen < self.after:
            return advantage
        kept = wide if advantage.dim() == 1 else wide[:, None]
        return advantage * (kept | advantage.isnan())  # a row without a score stays one


class Asymmetry(Change):
    """Easy questions count more while much is wrong, hard ones while much is right, and praise less than blame: A-GRAE
    (`token_advantages.asymmetric` of [right])."""

    tensors = ("right",)
    name: Literal["asymmetry"] = "asymmetry"
    alpha: Positive = 1.0
    """Share of right answers from which praise counts in full (geometry, medicine: .5)."""

    def changed(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        right = batch.read("right", self.name)
        changed, scored = advantage.clone(), ~batch.scores(self.name).isnan()  # the others are neither right nor wrong
        changed[scored] = token_advantages.asymmetric(
            advantage[scored], right[scored], batch.group[scored], alpha=self.alpha
        )
        return changed


Transform = (
    BatchNormalise
    | SigmaFilter
    | Uncertainty
    | TrajectoryDependency
    | ClampAdvantage
    | InformativeGroups
    | Asymmetry
    | SpreadFilter
)
