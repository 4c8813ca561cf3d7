"""Rules of ratio and clip (`genrl.objectives.tokens.token_surrogates`), and losses of whole groups in their place."""

from __future__ import annotations

from typing import Literal

from genrl.config.section import NonNegative, Positive, Share
from genrl.vlm.recipe.choice import Choice


class Clip(Choice):
    """PPO's clip of the ratio of each token: GRPO, DAPO."""

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


class ElasticClip(Choice):
    """`clip` with widths that grow with the advantage and the group's spread: ETR, experimental."""

    name: Literal["elastic_clip"] = "elastic_clip"
    low: NonNegative = 0.2
    """Narrowest width below 1."""
    high: NonNegative = 0.2
    """Narrowest width above 1."""


class SequenceClip(Choice):
    """PPO's clip of one ratio per row, the geometric mean of its tokens': GSPO, LUSPO."""

    name: Literal["sequence_clip"] = "sequence_clip"
    low: NonNegative = 3e-4
    """The ratio is clipped below 1 - low."""
    high: NonNegative = 4e-4
    """The ratio is clipped above 1 + high."""


class SequenceTokenClip(Choice):
    """`sequence_clip` with an advantage per token: GSPO-token."""

    name: Literal["sequence_token_clip"] = "sequence_token_clip"
    low: NonNegative = 3e-4
    """The ratio is clipped below 1 - low."""
    high: NonNegative = 4e-4
    """The ratio is clipped above 1 + high."""


class DynamicClip(Choice):
    """PPO's clip with bounds by the token's old probability, the upper one 10 at most; for negative advantages the
    objective is at least 10 A: DCPO."""

    name: Literal["dynamic_clip"] = "dynamic_clip"
    low: NonNegative = 0.16
    """Width below 1 (the scripts: .2)."""
    high: NonNegative = 0.2
    """Width above 1 (the scripts: .28)."""


class LogClamp(Choice):
    """`clip` of a ratio that is clamped to 1e-3 and 1e3 before the exponential: StableReinforce."""

    name: Literal["log_clamp"] = "log_clamp"
    low: NonNegative = 0.2
    """The ratio is clipped below 1 - low."""
    high: NonNegative = 0.2
    """The ratio is clipped above 1 + high."""


class GeometricMean(Choice):
    """The geometric mean of a row's ratios, each clipped in the log domain: GMPO."""

    name: Literal["geometric_mean"] = "geometric_mean"
    low: NonNegative = 0.4
    """A ratio is clipped below exp(-low)."""
    high: NonNegative = 0.4
    """A ratio is clipped above exp(high)."""


class KlCov(Choice):
    """The plain ratio, and a penalty of moving the tokens whose log-probability and advantage vary together: KL-Cov
    (`token_covariance`)."""

    name: Literal["kl_cov"] = "kl_cov"
    share: Share = 2e-3
    """Share of the tokens that have the penalty (7B: 2e-3, 32B: 2e-4)."""
    beta: NonNegative = 1.0
    """Weight of |l - l_old|."""


class Cispo(Choice):
    """The clipped ratio as a weight without gradient: CISPO."""

    name: Literal["cispo"] = "cispo"
    highest: NonNegative = 5.0
    """Largest weight."""


class Sapo(Choice):
    """A soft gate of the ratio, of steepness 1 for positive advantages and 1.05 for the others: SAPO."""

    name: Literal["sapo"] = "sapo"


class Reinforce(Choice):
    """The policy gradient itself, without a ratio."""

    name: Literal["reinforce"] = "reinforce"


class Vespo(Choice):
    """A soft weight by the ratio W of the row, `W^k exp(lambda (1 - W))`, k = 2 and lambda = 3 for advantages of 0 or
    more, 3 and 2 for the others: VESPO."""

    name: Literal["vespo"] = "vespo"


class LinearBound(Choice):
    """A linear lower bound of the objective, of samples of a masked diffusion model's evidence bound in place of
    log-probabilities of tokens: BGPO (`masked_diffusion.linear_bound_loss`)."""

    name: Literal["linear_bound"] = "linear_bound"


Surrogate = (
    Clip
    | ElasticClip
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

CLIPPED = (Clip, ElasticClip, SequenceClip, SequenceTokenClip, DynamicClip, LogClamp, GeometricMean, Cispo, Sapo)
"""Those that keep near the policy before the update by its ratio, hard or softly."""

# --- losses of whole groups, in place of weights, surrogate and aggregation


class Regression(Choice):
    """Log-ratios regressed on advantages: Reg-GRPO (`group_losses.regression_loss`)."""

    name: Literal["regression"] = "regression"


class Classification(Choice):
    """Answers of positive advantage told from the others: REAL (`group_losses.classification_loss`)."""

    name: Literal["classification"] = "classification"


class DistributionMatching(Choice):
    """The model's distribution over a group's answers brought to that of their rewards: DMPO, experimental
    (`group_losses.distribution_matching_loss`)."""

    name: Literal["distribution_matching"] = "distribution_matching"


class Preference(Choice):
    """DPO on the best and the worst answer of each group (`preference.dpo_loss`). A group without spread has no pair,
    and counts in the mean."""

    tensors = ("ref",)
    name: Literal["preference"] = "preference"
    beta: Positive = 0.1
    """Weight of the log-ratios to the model before training."""


GroupLoss = Regression | Classification | DistributionMatching | Preference
