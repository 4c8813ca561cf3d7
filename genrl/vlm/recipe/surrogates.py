"""Rules of ratio and clip (`genrl.objectives.tokens.token_surrogates`), and losses of whole groups in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.section import NonNegative, Positive, Share
from genrl.vlm.recipe.choice import Choice, lazily

if TYPE_CHECKING:
    from torch import Tensor

    from genrl.objectives.advantages import groups
    from genrl.objectives.preferences import preference
    from genrl.objectives.surrogates.policy_losses import SurrogateOutput
    from genrl.objectives.tokens import (
        group_losses,
        token_surrogates,
        token_weights,
    )
    from genrl.objectives.tokens import (
        tokens as masking,
    )
    from genrl.vlm.rollout.token_batch import TokenBatch
else:
    groups = lazily("genrl.objectives.advantages.groups")
    preference = lazily("genrl.objectives.preferences.preference")
    group_losses = lazily("genrl.objectives.tokens.group_losses")
    token_weights = lazily("genrl.objectives.tokens.token_weights")
    token_surrogates = lazily("genrl.objectives.tokens.token_surrogates")
    masking = lazily("genrl.objectives.tokens.tokens")


class Rule(Choice):
    """A rule of ratio and clip."""

    near: ClassVar[bool] = False
    """It keeps near the policy before the update by its ratio, hard or softly."""
    one_ratio: ClassVar[bool] = False
    """The ratio is that of a completion, not of a token."""
    of_rows: ClassVar[bool] = False
    """It needs one advantage per completion, the same for its tokens."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        """Terms [B, T], or [B, 1] of completions, of a micro-batch; gradient through `batch.log_prob`."""
        raise NotImplementedError


class Clip(Rule):
    """PPO's clip of the ratio of each token: GRPO, DAPO."""

    near = True
    name: Literal["clip"] = "clip"
    low: NonNegative = 0.2
    """The ratio is clipped below 1 - low."""
    high: NonNegative = 0.2
    """The ratio is clipped above 1 + high (DAPO: .28)."""
    cap: Positive | None = None
    """Largest ratio where the clip does not bind (INTELLECT-2's two-sided clip); null = none."""
    dual: Positive | None = None
    """Negative advantages: the objective is at least dual * A (verl: 3); null = unbounded."""
    drop_above: Positive | None = None
    """Rows with a ratio above it keep the clipped branch alone (VL-DAC: 10); null = none do."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.clip_surrogate(
            *batch.terms, low=self.low, high=self.high, cap=self.cap, dual=self.dual, drop_above=self.drop_above
        )


class SequenceClip(Rule):
    """PPO's clip of one ratio per row, the geometric mean of its tokens': GSPO, LUSPO."""

    near = True
    one_ratio = True
    of_rows = True
    name: Literal["sequence_clip"] = "sequence_clip"
    low: NonNegative = 3e-4
    """The ratio is clipped below 1 - low."""
    high: NonNegative = 4e-4
    """The ratio is clipped above 1 + high."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.sequence_clip_surrogate(*batch.terms, low=self.low, high=self.high)


class SequenceTokenClip(Rule):
    """`sequence_clip` with an advantage per token: GSPO-token."""

    near = True
    one_ratio = True
    name: Literal["sequence_token_clip"] = "sequence_token_clip"
    low: NonNegative = 3e-4
    """The ratio is clipped below 1 - low."""
    high: NonNegative = 4e-4
    """The ratio is clipped above 1 + high."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.sequence_token_clip_surrogate(*batch.terms, low=self.low, high=self.high)


class DynamicClip(Rule):
    """PPO's clip with bounds by the token's old probability, the upper one 10 at most; for negative advantages the
    objective is at least 10 A: DCPO."""

    near = True
    name: Literal["dynamic_clip"] = "dynamic_clip"
    low: NonNegative = 0.16
    """Width below 1 (the scripts: .2)."""
    high: NonNegative = 0.2
    """Width above 1 (the scripts: .28)."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.dynamic_clip_surrogate(*batch.terms, low=self.low, high=self.high)


class LogClamp(Rule):
    """`clip` of a ratio that is clamped to 1e-3 and 1e3 before the exponential: StableReinforce."""

    near = True
    name: Literal["log_clamp"] = "log_clamp"
    low: NonNegative = 0.2
    """The ratio is clipped below 1 - low."""
    high: NonNegative = 0.2
    """The ratio is clipped above 1 + high."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.log_clamp_surrogate(*batch.terms, low=self.low, high=self.high)


class GeometricMean(Rule):
    """The geometric mean of a row's ratios, each clipped in the log domain: GMPO."""

    near = True
    one_ratio = True
    of_rows = True
    name: Literal["geometric_mean"] = "geometric_mean"
    low: NonNegative = 0.4
    """A ratio is clipped below exp(-low)."""
    high: NonNegative = 0.4
    """A ratio is clipped above exp(high)."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.geometric_mean_surrogate(*batch.terms, low=self.low, high=self.high)


class KlCov(Rule):
    """The plain ratio, and a penalty of moving the tokens whose log-probability and advantage vary together: KL-Cov
    (`token_weights.token_covariance`)."""

    tensors = ("old",)
    name: Literal["kl_cov"] = "kl_cov"
    share: Share = 2e-3
    """Share of the tokens that have the penalty (7B: 2e-3, 32B: 2e-4)."""

    def prepared(self, batch: TokenBatch) -> dict[str, Tensor]:
        assert batch.advantage is not None, "it is estimated before"
        together = token_weights.token_covariance(batch.read("old_log_prob", self.name), batch.advantage, batch.scored)
        return {"kl_cov": token_weights.kl_cov_tokens(together, batch.scored, share=self.share)}

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.kl_cov_surrogate(*batch.terms, batch.read("kl_cov", self.name), beta=1.0)


class Cispo(Rule):
    """The clipped ratio as a weight without gradient: CISPO."""

    near = True
    name: Literal["cispo"] = "cispo"
    high: NonNegative = 5.0
    """Largest weight (TRL's epsilon_high)."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.cispo_surrogate(*batch.terms, highest=self.high)


class Sapo(Rule):
    """A soft gate of the ratio, of steepness 1 for positive advantages and 1.05 for the others: SAPO."""

    near = True
    name: Literal["sapo"] = "sapo"

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.sapo_surrogate(*batch.terms)


class Reinforce(Rule):
    """The policy gradient itself, without a ratio."""

    name: Literal["reinforce"] = "reinforce"

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.reinforce_surrogate(*batch.terms)


class Vespo(Rule):
    """A soft weight by the ratio W of the row, `W^k exp(lambda (1 - W))`, k = 2 and lambda = 3 for advantages of 0 or
    more, 3 and 2 for the others: VESPO."""

    of_rows = True
    name: Literal["vespo"] = "vespo"

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.vespo_surrogate(*batch.terms)


class LinearBound(Rule):
    """A linear lower bound of the objective, of samples of a masked diffusion model's evidence bound in place of
    log-probabilities of tokens: BGPO (`group_losses.linear_bound_loss`)."""

    of_rows = True
    tensors = ("bound",)
    name: Literal["linear_bound"] = "linear_bound"

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        from genrl.objectives.surrogates.policy_losses import SurrogateOutput

        if not bool(batch.mask.bool().all()):
            raise ValueError("the columns of log_prob are ELBO samples here: the mask must be 1 everywhere")
        log_prob, old, advantage, mask = batch.terms
        ratio = masking.mean_log_ratio(log_prob.detach(), old, mask)[:, None].exp()
        return SurrogateOutput(
            group_losses.linear_bound_loss(log_prob, old, advantage)[:, None],
            ratio,
            ratio.new_zeros(ratio.shape).bool(),
        )


Surrogate = (
    Clip
    | SequenceClip
    | SequenceTokenClip
    | DynamicClip
    | LogClamp
    | GeometricMean
    | KlCov
    | Cispo
    | Sapo
    | Reinforce
    | Vespo
    | LinearBound
)

# --- losses of whole groups, in place of weights, surrogate and aggregation


class WholeGroups(Choice):
    """A loss of whole groups."""

    def loss(self, batch: TokenBatch, scored: Tensor) -> Tensor:
        """This micro-batch's part of the step's loss, []. scored: the rows that have rewards, bool [B]: of advantage 0,
        one without would be taught as no better than its group."""
        raise NotImplementedError


class Regression(WholeGroups):
    """Log-ratios regressed on advantages: Reg-GRPO (`group_losses.regression_loss`)."""

    name: Literal["regression"] = "regression"

    def loss(self, batch: TokenBatch, scored: Tensor) -> Tensor:
        log_prob, old, advantage, mask = batch.terms
        ratio = masking.sequence_log_ratio(log_prob, old, mask)[scored]
        return group_losses.regression_loss(ratio, advantage[scored], batch.group[scored]).sum() / batch.number


class Classification(WholeGroups):
    """Answers of positive advantage told from the others: REAL (`group_losses.classification_loss`)."""

    name: Literal["classification"] = "classification"

    def loss(self, batch: TokenBatch, scored: Tensor) -> Tensor:
        log_prob, old, advantage, mask = batch.terms
        score = masking.mean_log_ratio(log_prob, old, mask)[scored]
        return (
            group_losses.classification_loss(score, advantage[scored] > 0, batch.group[scored]).sum()
            / batch.number_of_groups
        )


class Preference(WholeGroups):
    """DPO on the best and the worst answer of each group (`preference.dpo_loss`). A group without spread has no pair,
    and counts in the mean."""

    tensors = ("ref",)
    name: Literal["preference"] = "preference"
    beta: Positive = 0.1
    """Weight of the log-ratios to the model before training."""

    def loss(self, batch: TokenBatch, scored: Tensor) -> Tensor:
        sign = groups.best_and_worst(batch.scores(self.name), batch.group)
        best, worst = ((sign == side).nonzero()[:, 0] for side in (1, -1))  # by group, since rows of one are together
        now = masking.row_sum(batch.terms[0], batch.mask)
        ref = masking.row_sum(batch.read("ref_log_prob", self.name), batch.mask)
        return (
            preference.dpo_loss(now[best], now[worst], ref[best], ref[worst], beta=self.beta).loss.sum()
            / batch.number_of_groups
        )


GroupLoss = Regression | Classification | Preference
