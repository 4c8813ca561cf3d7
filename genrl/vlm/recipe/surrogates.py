"""Rules of ratio and clip (`genrl.objectives.token_surrogates`, `token_weights`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.section import NonNegative, Positive, Share
from genrl.vlm.recipe import Choice, lazily

if TYPE_CHECKING:
    from torch import Tensor

    from genrl.objectives import token_surrogates, token_weights
    from genrl.objectives import tokens as masking
    from genrl.objectives.policy_losses import SurrogateOutput
    from genrl.vlm.rollout.token_batch import TokenBatch
else:
    # On first use: `check` reads these classes as a part of the configuration, without torch.
    token_surrogates = lazily("genrl.objectives.token_surrogates")
    token_weights = lazily("genrl.objectives.token_weights")
    masking = lazily("genrl.objectives.tokens")


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
    drop_above: ClassVar[float | None] = None
    """Rows with a ratio above it keep the clipped branch alone; None: none do."""
    name: Literal["clip"] = "clip"
    low: NonNegative = 0.2
    """The ratio is clipped below 1 - low."""
    high: NonNegative = 0.2
    """The ratio is clipped above 1 + high (DAPO: .28)."""
    cap: Positive | None = None
    """Largest ratio where the clip does not bind (INTELLECT-2's two-sided clip); null = none."""
    dual: Positive | None = None
    """Negative advantages: the objective is at least dual * A (verl: 3); null = unbounded."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_surrogates.clip_surrogate(
            *batch.terms, low=self.low, high=self.high, cap=self.cap, dual=self.dual, drop_above=self.drop_above
        )


class RowClip(Clip):
    """`clip` in which rows with a ratio above 10 keep the clipped branch alone: VL-DAC."""

    drop_above: ClassVar[float | None] = 10.0
    name: Literal["row_clip"] = "row_clip"  # type: ignore[assignment]


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
    log-probabilities of tokens: BGPO (`token_surrogates.linear_bound_loss`)."""

    of_rows = True
    tensors = ("bound",)
    name: Literal["linear_bound"] = "linear_bound"

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        # Here: at the top it would load torch when a configuration is read.
        from genrl.objectives.policy_losses import SurrogateOutput

        if not bool(batch.mask.bool().all()):
            raise ValueError("the columns of log_prob are ELBO samples here: the mask must be 1 everywhere")
        log_prob, old, advantage, mask = batch.terms
        ratio = masking.mean_log_ratio(log_prob.detach(), old, mask)[:, None].exp()
        return SurrogateOutput(
            token_surrogates.linear_bound_loss(log_prob, old, advantage)[:, None],
            ratio,
            ratio.new_zeros(ratio.shape).bool(),
        )


class ProbabilityMask(Rule):
    """The plain ratio; no gradient away from the old policy for tokens whose probability has moved by more than width:
    DPPO (`token_weights.probability_mask_surrogate`)."""

    near = True
    name: Literal["probability_mask"] = "probability_mask"
    width: Positive = 0.15
    """Largest change of a token's probability."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_weights.probability_mask_surrogate(*batch.terms, delta=self.width)


class CumulativeMask(Rule):
    """`probability_mask` with a budget that the tokens of an answer share: CPPO
    (`token_weights.cumulative_mask_surrogate`)."""

    near = True
    name: Literal["cumulative_mask"] = "cumulative_mask"
    width: Positive = 0.2
    """Largest change of a token's probability."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_weights.cumulative_mask_surrogate(*batch.terms, delta=self.width)


class Quadratic(Rule):
    """The plain ratio less a square that holds a token's probability near: DRPO (`quadratic_surrogate`)."""

    near = True
    name: Literal["quadratic"] = "quadratic"
    width: Positive = 12.5
    """Change of a token's probability at which its gradient is 0."""

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        return token_weights.quadratic_surrogate(*batch.terms, width=self.width)


class LowProbability(Rule):
    """PPO's clip of the ratio between 0 and 10; the rarest tokens of negative advantage are held near what they would
    be without the noise, [proxy]: Lp-Reg (`token_weights.low_probability_surrogate`)."""

    near = True
    tensors = ("old", "proxy")
    noise: ClassVar[float] = 0.02
    """Share of the largest probability below which a token is noise."""
    name: Literal["low_probability"] = "low_probability"
    share: Share = 0.01
    """Share of the tokens of negative advantage that are held (32B: .005)."""

    def prepared(self, batch: TokenBatch) -> dict[str, Tensor]:
        assert batch.advantage is not None, "it is estimated before"
        # Lp-Reg protects tokens that are pushed down: rewarded ones need no help.
        blamed = batch.scored & (masking.per_token(batch.advantage, batch.mask).expand(batch.mask.shape) < 0)
        rare = token_weights.lowest_share(batch.read("old_log_prob", self.name), blamed, share=self.share)
        return {"held": rare}

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        proxy, held = (batch.read(name, self.name) for name in ("proxy", "held"))
        return token_weights.low_probability_surrogate(*batch.terms, proxy, held)


class EntropyAdaptive(Rule):
    """PPO's clip and its advantages by the entropy of each token, [entropy]: HAPO (`entropy_adaptive`)."""

    near = True
    tensors = ("entropy",)
    name: Literal["entropy_adaptive"] = "entropy_adaptive"
    width: Share = 0.2
    """The ratio is clipped so far from 1 at medium entropy, up to twice as far at the extremes."""
    dual: Positive = 10.0
    """Negative advantages: the objective is at least dual * A."""

    def prepared(self, batch: TokenBatch) -> dict[str, Tensor]:
        return {"height": token_weights.relative_entropy(batch.read("entropy", self.name), batch.mask)}

    def loss(self, batch: TokenBatch) -> SurrogateOutput:
        log_prob, old, _, mask = batch.terms
        height = batch.read("height", self.name).to(log_prob.dtype)
        low, high, advantage = token_weights.entropy_adaptive(*batch.terms, height, width=self.width)
        return token_surrogates.clip_surrogate(log_prob, old, advantage, mask, low=low, high=high, dual=self.dual)


Surrogate = (
    Clip
    | RowClip
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
    | ProbabilityMask
    | CumulativeMask
    | Quadratic
    | LowProbability
    | EntropyAdaptive
)
