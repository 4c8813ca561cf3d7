"""Weights of tokens, which are multiplied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from genrl.config.section import NonNegative, Number, Positive, Share
from genrl.vlm.recipe import Choice, lazily

if TYPE_CHECKING:
    from torch import Tensor

    from genrl.objectives import token_weights
    from genrl.vlm.rollout.token_batch import TokenBatch
else:
    token_weights = lazily("genrl.objectives.token_weights")


class Weight(Choice):
    """A factor of tokens."""

    def factor(self, batch: TokenBatch) -> Tensor | None:
        """[B, T] or [B, 1], from the whole rollout batch and its advantages; None where it is `factor_now` alone."""
        return None

    def factor_now(self, batch: TokenBatch) -> Tensor | None:
        """[B, T] or [B, 1], from a micro-batch under the weights as they are; None where it does not depend on them."""
        return None


class TopEntropy(Weight):
    """1 for the tokens of the batch of highest [entropy], 0 for the others: forking tokens
    (`token_weights.top_entropy`)."""

    tensors = ("entropy",)
    name: Literal["top_entropy"] = "top_entropy"
    share: Share = 0.2
    """Share of the tokens that are trained."""

    def factor(self, batch: TokenBatch) -> Tensor:
        return token_weights.top_entropy(batch.read("entropy", self.name), batch.mask, share=self.share)


class TopEntropyOfRow(TopEntropy):
    """The same within each row: SPINE (`token_weights.top_of_row`)."""

    name: Literal["top_entropy_of_row"] = "top_entropy_of_row"  # type: ignore[assignment]

    def factor(self, batch: TokenBatch) -> Tensor:
        return token_weights.top_of_row(batch.read("entropy", self.name), batch.mask, share=self.share)


class TopDependency(Weight):
    """1 for the tokens of a row that depend most on the picture, by [masked_image]: VPPO (`token_weights.top_of_row` of
    `visual_dependency`)."""

    tensors = ("masked_image", "old")
    name: Literal["top_dependency"] = "top_dependency"
    share: Share = 0.4
    """Share of a row's tokens that are trained."""

    def factor(self, batch: TokenBatch) -> Tensor:
        old, blind = (batch.read(name, self.name) for name in ("old_log_prob", "masked_image"))
        return token_weights.top_of_row(
            token_weights.visual_dependency(old, blind, batch.mask), batch.mask, share=self.share
        )


class Divergence(Weight):
    """From 1 to 1.7, by how much a group disagrees on the next token, [divergence]: TW-GRPO
    (`token_weights.divergence_weights`)."""

    tensors = ("divergence",)
    name: Literal["divergence"] = "divergence"

    def factor(self, batch: TokenBatch) -> Tensor:
        rows, numbers = batch.read("divergence", self.name), batch.group.tolist()
        first = [numbers.index(number) for number in sorted(set(numbers))]  # a group's rows have the same
        return token_weights.divergence_weights(rows[first], batch.mask, batch.group)


class ClipCov(Weight):
    """0 for a few tokens, drawn at random ([draw]), whose covariance of log-probability and advantage is large, 1 for
    the others: Clip-Cov (`token_weights.token_covariance`)."""

    tensors = ("draw", "old")
    name: Literal["clip_cov"] = "clip_cov"
    share: Share = 2e-4
    """Share of the tokens that are left out."""
    low: NonNegative = 1.0
    """They have a covariance above this."""
    high: NonNegative = 5.0
    """They have a covariance below this."""

    def factor(self, batch: TokenBatch) -> Tensor:
        assert batch.advantage is not None, "it is estimated before"
        together = token_weights.token_covariance(batch.read("old_log_prob", self.name), batch.advantage, batch.scored)
        limits = {"share": self.share, "low": self.low, "high": self.high}
        return token_weights.clip_cov_weight(together, batch.read("draw", self.name), batch.scored, **limits)


class EngineMismatch(Weight):
    """`exp(l_old - l_sampler)`, for the engine that sampled (`token_weights.mismatch_weights`). TRL: sequence, mask, 3;
    truncated importance sampling: token, truncate, 2; IcePop: token, mask, from .5 to 5."""

    tensors = ("old",)
    name: Literal["engine_mismatch"] = "engine_mismatch"
    level: Literal["token", "sequence", "sequence_geo"] = "sequence"
    """Of each token, of the row, or of the row with its length taken out."""
    mode: Literal["truncate", "mask"] = "mask"
    """Outside of the limits: the limit, or 0."""
    low: NonNegative = 0.0
    """Lower limit of p_old / p_sampler (IcePop: .5). Bounds on the inverse: 1 over the upper."""
    high: Positive = 3.0
    """Upper limit of p_old / p_sampler (TRL: 3; PARA-GRPO and IcePop: 5). Bounds on the inverse: 1 over the lower."""

    def factor(self, batch: TokenBatch) -> Tensor:
        old, sampler = (batch.read(name, self.name) for name in ("old_log_prob", "sampler_log_prob"))
        limits = {"low": self.low, "high": self.high}
        return token_weights.mismatch_weights(old, sampler, batch.mask, level=self.level, mode=self.mode, **limits)


class OffPolicyMask(Weight):
    """0 for rows of negative advantage that the policy has moved away from: DeepSeek-V3.2
    (`token_weights.off_policy_mask`, for each update anew)."""

    name: Literal["off_policy_mask"] = "off_policy_mask"
    high: Number
    """Mean of l_sampler - l above which a row is left out."""

    def factor_now(self, batch: TokenBatch) -> Tensor:
        log_prob, _, advantage, mask = batch.terms
        sampler = batch.read("sampler_log_prob", self.name)
        return token_weights.off_policy_mask(log_prob, sampler, advantage, mask, threshold=self.high)


class StepMeans(Weight):
    """Tokens / tokens of this step, by [step]: with aggregation token_mean_global the sum of the steps' own means, two
    separate losses (Hi-GRPO)."""

    tensors = ("step",)
    name: Literal["step_means"] = "step_means"

    def factor(self, batch: TokenBatch) -> Tensor:
        step, mask = batch.read("step", self.name), batch.mask.bool()
        factor = mask.new_ones(mask.shape).double()
        for number in sorted(set(step[mask].tolist())):
            tokens = mask & (step == number)
            factor[tokens] = float(mask.sum() / tokens.sum())
        return factor


TokenWeight = (
    TopEntropy | TopEntropyOfRow | TopDependency | Divergence | ClipCov | EngineMismatch | OffPolicyMask | StepMeans
)
