"""What a token-policy method is made of: named choices with their constants, and nothing else.

A `Preset` is one row of the table of published methods. Every choice is a frozen dataclass with a `name`, so that a
preset is plain data: `dataclasses.asdict` prints it in full, and YAML writes it. What the choices compute is in
`genrl.objectives.token_*`; `estimate.py` and `policy_loss.py` compose them. A field that is an argument of the named
function means what it means there.

Named tensors that a choice reads from `TokenBatch.extra` ([B, T] unless said otherwise) are in brackets.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from genrl.objectives.tokens.token_aggregation import Aggregation
from genrl.objectives.tokens.token_weights import MismatchLevel, MismatchMode

# --- advantage estimators: rewards of the whole rollout batch -> [B] or [B, T]


@dataclass(frozen=True)
class GroupAdvantage:
    """`advantages.group_advantages` with sample std: GRPO ("group"), Dr. GRPO ("none"), batch std ("global")."""

    scale: Literal["group", "global", "none"] = "group"
    eps: float = 1e-4
    name: Literal["group"] = "group"


@dataclass(frozen=True)
class LeaveOneOut:
    """`token_advantages.leave_one_out`: RLOO."""

    name: Literal["leave_one_out"] = "leave_one_out"


@dataclass(frozen=True)
class WhitenedReturns:
    """`token_advantages.whitened` of `token_returns`: of [token_rewards], or of the row's reward at its last token.

    baseline: subtract the group's mean from the row's reward first (REINFORCE++-baseline).
    """

    baseline: bool = False
    gamma: float = 1.0
    eps: float = 1e-8
    name: Literal["whitened_returns"] = "whitened_returns"


@dataclass(frozen=True)
class VirtualReward:
    """`token_advantages.with_virtual_reward`: NGRPO."""

    best: float = 1.0
    count: int = 1
    eps: float = 1e-6
    name: Literal["virtual_reward"] = "virtual_reward"


@dataclass(frozen=True)
class SmoothedAdvantage:
    """`token_advantages.smoothed_advantages`: DCPO. Has a state (`visits`), kept by the caller and checkpointed."""

    name: Literal["smoothed"] = "smoothed"


@dataclass(frozen=True)
class RankQuantiles:
    """`token_advantages.rank_quantiles`: G2RPO. Ranks within the "group" or the "task" ([task], [B] integers)."""

    scope: Literal["group", "task"] = "group"
    name: Literal["rank_quantiles"] = "rank_quantiles"


@dataclass(frozen=True)
class NormaliseThenSum:
    """`token_advantages.normalise_then_sum` of [components] [B, K]: GDPO. weights: K numbers."""

    weights: tuple[float, ...]
    eps: float = 1e-4
    rewhiten: bool = True
    name: Literal["normalise_then_sum"] = "normalise_then_sum"


@dataclass(frozen=True)
class CriticAdvantage:
    """[credit] [B] or [B, T] from a value function: the trainer runs `token_credit` with these constants first.

    "step": `step_gae` over environment steps, one row each; "token": `token_gae` over the tokens of actions (BAD).
    """

    level: Literal["step", "token"] = "step"
    gamma: float = 0.95
    lam: float = 0.95
    name: Literal["critic"] = "critic"


@dataclass(frozen=True)
class Hierarchical:
    """`token_advantages.hierarchical_advantages` of [high] and [low] [B], rewards of an answer's two steps: Hi-GRPO.

    Tokens of the first step ([step] 0) have the one, those of the second the other.
    """

    share: float = 0.5
    eps: float = 1e-8
    name: Literal["hierarchical"] = "hierarchical"


Advantage = (
    GroupAdvantage
    | LeaveOneOut
    | WhitenedReturns
    | VirtualReward
    | SmoothedAdvantage
    | RankQuantiles
    | NormaliseThenSum
    | CriticAdvantage
    | Hierarchical
)

# --- added to the rewards before the estimator


@dataclass(frozen=True)
class LengthReward:
    """`reward_shaping.length_reward` of the completion's tokens, times `coefficient`."""

    thresholds: tuple[float, float, float, float]
    coefficient: float = 1.0
    name: Literal["length"] = "length"


@dataclass(frozen=True)
class OverlongPenalty:
    """`reward_shaping.overlong_penalty`: DAPO's soft punishment. The published lengths are 20480 and 4096."""

    maximum: int
    buffer: int
    name: Literal["overlong"] = "overlong"


@dataclass(frozen=True)
class ConsistencyBonus:
    """`reward_shaping.consistency_bonus` from [accuracy] [B], [ema] and [answer_mask]: GRPO-CARE."""

    coefficient: float = 0.5
    margin: float = 0.0
    floor: float = 0.1
    cap: float = 0.95
    name: Literal["consistency"] = "consistency"


@dataclass(frozen=True)
class KlInReward:
    """`-beta (l_old - l_ref)`: per token for `WhitenedReturns`, else summed over the row."""

    beta: float
    name: Literal["kl_in_reward"] = "kl_in_reward"


RewardTerm = LengthReward | OverlongPenalty | ConsistencyBonus | KlInReward

# --- advantage transforms, in order


@dataclass(frozen=True)
class BatchNormalise:
    """`token_advantages.batch_normalised`."""

    eps: float = 1e-8
    name: Literal["batch_normalise"] = "batch_normalise"


@dataclass(frozen=True)
class SigmaFilter:
    """`token_advantages.sigma_filtered`: StableReinforce, after whitening."""

    limit: float = 3.0
    name: Literal["sigma_filter"] = "sigma_filter"


@dataclass(frozen=True)
class Uncertainty:
    """Times `exp(-alpha u)`, u `token_advantages.score_uncertainty` of [scores] [B] (NaN = unparsable): Q-Hawkeye."""

    alpha: float = 0.2
    low: float = 1.0
    high: float = 5.0
    name: Literal["uncertainty"] = "uncertainty"


@dataclass(frozen=True)
class TrajectoryDependency:
    """Times `token_advantages.trajectory_weight` by [masked_image]: VPPO."""

    minimum: float = 0.9
    name: Literal["trajectory_dependency"] = "trajectory_dependency"


@dataclass(frozen=True)
class ClampAdvantage:
    """To +-limit."""

    limit: float
    name: Literal["clamp"] = "clamp"


@dataclass(frozen=True)
class PositiveOnly:
    """Negative advantages become 0."""

    name: Literal["positive_only"] = "positive_only"


Transform = BatchNormalise | SigmaFilter | Uncertainty | TrajectoryDependency | ClampAdvantage | PositiveOnly

# --- token weights, multiplied


@dataclass(frozen=True)
class TopEntropy:
    """The `share` of tokens of highest [entropy]: `top_entropy` of the "batch" (80/20), `top_of_row` of each "row"."""

    share: float = 0.2
    scope: Literal["batch", "row"] = "batch"
    name: Literal["top_entropy"] = "top_entropy"


@dataclass(frozen=True)
class TopDependency:
    """`top_of_row` by `visual_dependency` on [masked_image]: VPPO."""

    share: float = 0.4
    name: Literal["top_dependency"] = "top_dependency"


@dataclass(frozen=True)
class Divergence:
    """`divergence_weights` of [divergence], each row that of its group (`group_divergence`): TW-GRPO."""

    alpha: float = 1.7
    name: Literal["divergence"] = "divergence"


@dataclass(frozen=True)
class EngineMismatch:
    """`mismatch_weights` of `sampler_log_prob`."""

    level: MismatchLevel = "sequence"
    mode: MismatchMode = "mask"
    low: float = 0.0
    high: float = 3.0
    name: Literal["engine_mismatch"] = "engine_mismatch"


@dataclass(frozen=True)
class OffPolicyMask:
    """`off_policy_mask` of `sampler_log_prob`, for each update anew."""

    threshold: float
    name: Literal["off_policy_mask"] = "off_policy_mask"


@dataclass(frozen=True)
class StepMeans:
    """`tokens / tokens of this step`, by [step]: "token_mean_global" is then the sum of the steps' own token means, two
    separate losses (Hi-GRPO)."""

    name: Literal["step_means"] = "step_means"


TokenWeight = TopEntropy | TopDependency | Divergence | EngineMismatch | OffPolicyMask | StepMeans

# --- surrogates


@dataclass(frozen=True)
class Clip:
    """`clip_surrogate`."""

    low: float = 0.2
    high: float = 0.2
    cap: float | None = None
    dual: float | None = None
    drop_above: float | None = None
    name: Literal["clip"] = "clip"


@dataclass(frozen=True)
class ElasticClip:
    """`clip_surrogate` with widths times `elastic_width`: ETR, experimental."""

    low: float = 0.2
    high: float = 0.2
    alpha: float = 0.5
    gamma: float = 0.5
    name: Literal["elastic_clip"] = "elastic_clip"


@dataclass(frozen=True)
class SequenceClip:
    """`sequence_clip_surrogate`: GSPO, LUSPO."""

    low: float = 3e-4
    high: float = 4e-4
    name: Literal["sequence_clip"] = "sequence_clip"


@dataclass(frozen=True)
class SequenceTokenClip:
    """`sequence_token_clip_surrogate`: GSPO-token."""

    low: float = 3e-4
    high: float = 4e-4
    name: Literal["sequence_token_clip"] = "sequence_token_clip"


@dataclass(frozen=True)
class DynamicClip:
    """`dynamic_clip_surrogate`: DCPO."""

    low: float = 0.16
    high: float = 0.2
    maximum: float = 10.0
    dual: float = 10.0
    name: Literal["dynamic_clip"] = "dynamic_clip"


@dataclass(frozen=True)
class LogClamp:
    """`log_clamp_surrogate`: StableReinforce."""

    delta: float = 1e3
    low: float = 0.2
    high: float = 0.2
    name: Literal["log_clamp"] = "log_clamp"


@dataclass(frozen=True)
class Cispo:
    """`cispo_surrogate`."""

    lowest: float = 0.0
    highest: float = 5.0
    name: Literal["cispo"] = "cispo"


@dataclass(frozen=True)
class Sapo:
    """`sapo_surrogate`."""

    positive: float = 1.0
    negative: float = 1.05
    name: Literal["sapo"] = "sapo"


@dataclass(frozen=True)
class Reinforce:
    """`reinforce_surrogate`."""

    name: Literal["reinforce"] = "reinforce"


@dataclass(frozen=True)
class Vespo:
    """`vespo_surrogate`."""

    positive: tuple[float, float] = (2.0, 3.0)
    negative: tuple[float, float] = (3.0, 2.0)
    name: Literal["vespo"] = "vespo"


@dataclass(frozen=True)
class LinearBound:
    """`masked_diffusion.linear_bound_loss`: BGPO. `log_prob` and `old_log_prob` are [B, M] samples of the ELBO."""

    name: Literal["linear_bound"] = "linear_bound"


Surrogate = (
    Clip
    | ElasticClip
    | SequenceClip
    | SequenceTokenClip
    | DynamicClip
    | LogClamp
    | Cispo
    | Sapo
    | Reinforce
    | Vespo
    | LinearBound
)

# --- losses of whole groups, in place of weight, surrogate and aggregation


@dataclass(frozen=True)
class Regression:
    """`group_losses.regression_loss`: Reg-GRPO."""

    eps: float = 1e-6
    name: Literal["regression"] = "regression"


@dataclass(frozen=True)
class Classification:
    """`group_losses.classification_loss`, positive where the advantage is: REAL."""

    tau: float = 0.5
    name: Literal["classification"] = "classification"


@dataclass(frozen=True)
class DistributionMatching:
    """`group_losses.distribution_matching_loss`: DMPO, experimental."""

    tau: float = 1.0
    name: Literal["distribution_matching"] = "distribution_matching"


@dataclass(frozen=True)
class Preference:
    """`preference.dpo_loss` of the best and the worst row of each group, l summed over the row, against `ref_log_prob`:
    DPO on pairs that the policy has just drawn. A group without spread has no pair, and counts in the mean."""

    beta: float = 0.1
    name: Literal["preference"] = "preference"


GroupLoss = Regression | Classification | DistributionMatching | Preference

# --- regularisers, added


@dataclass(frozen=True)
class Kl:
    """`beta` times a KL estimate to `ref_log_prob` per token, added before aggregation (TRL) and not weighted.

    weighted: multiply it by the token weights too (TW-GRPO). In a group loss it is aggregated by the preset's rule.
    corrected: multiply it by the ratio, so that its gradient is that of the KL itself (DeepSeek-V3.2, TRL's default).
    """

    beta: float = 0.04
    estimator: Literal["k2", "k3", "k3_clamped"] = "k3"
    weighted: bool = False
    corrected: bool = False
    name: Literal["kl"] = "kl"


@dataclass(frozen=True)
class EntropyPenalty:
    """`coefficient * sampled_entropy` over all tokens: positive lowers the entropy (VPPO .06), negative is a bonus."""

    coefficient: float
    name: Literal["entropy_penalty"] = "entropy_penalty"


@dataclass(frozen=True)
class EntropyBonus:
    """`-coefficient` times the mean over all tokens of [policy_entropy] [B, T], that of the whole distribution under
    the weights as they are. `EntropyPenalty`, of one sample, has no gradient in expectation on policy; this has."""

    coefficient: float = 0.01
    name: Literal["entropy_bonus"] = "entropy_bonus"


@dataclass(frozen=True)
class EntropyBand:
    """`coefficient * entropy_band(H)`, H = mean -l per task ([task] [B]; one task where it is not given): G2RPO.

    bounds "quantile": low and high are quantiles of the rollout batch's [entropy]. tokens "weighted": only tokens of
    weight other than 0, in H and in the quantiles (SPINE).
    """

    coefficient: float
    low: float
    high: float
    bounds: Literal["absolute", "quantile"] = "absolute"
    tokens: Literal["all", "weighted"] = "all"
    name: Literal["entropy_band"] = "entropy_band"


@dataclass(frozen=True)
class Perception:
    """`perception_loss` against [degraded]; rows where that is NaN have no degraded twin: Q-Hawkeye."""

    gamma: float = 1e-4
    eta: float = 1e-3
    name: Literal["perception"] = "perception"


@dataclass(frozen=True)
class ValueLoss:
    """`coefficient * clipped_value_loss` of [value], [old_value] and [returns], [B] or [B, T]: VL-DAC, POAD."""

    coefficient: float = 0.5
    clip: float = 0.1
    name: Literal["value"] = "value"


Regulariser = Kl | EntropyPenalty | EntropyBonus | EntropyBand | Perception | ValueLoss


@dataclass(frozen=True)
class Preset:
    """A method: `aggregate(-weight * surrogate(advantage) + KL) + regularisers`, or a loss of whole groups.

    length: the divisor of aggregation "const", the longest completion allowed.
    renormalise: scale the token weights to mean 1 over the rollout batch's tokens (no published method does).
    warmup: with a critic, iterations at the start that train it alone. kl_stop: with a critic, the mean of l_old - l
    above which an iteration's updates end; None = they never do.
    source: paper; notes: what belongs to the method and is not a setting of the loss, and what is our reading.
    Raises ValueError for a combination that means nothing.
    """

    advantage: Advantage
    surrogate: Surrogate | None = None
    aggregation: Aggregation = "token_mean_global"
    reward_terms: tuple[RewardTerm, ...] = ()
    transforms: tuple[Transform, ...] = ()
    weights: tuple[TokenWeight, ...] = ()
    regularisers: tuple[Regulariser, ...] = ()
    group_loss: GroupLoss | None = None
    length: int | None = None
    renormalise: bool = False
    warmup: int = 0
    kl_stop: float | None = None
    source: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        if (self.surrogate is None) == (self.group_loss is None):
            raise ValueError("a preset needs a surrogate or a group_loss, and not both")
        if self.group_loss is not None and (self.weights or self.aggregation == "balanced"):
            raise ValueError("a group loss compares whole completions: token weights and 'balanced' do not apply to it")
        per_token = isinstance(self.advantage, WhitenedReturns | Hierarchical) or (
            isinstance(self.advantage, CriticAdvantage) and self.advantage.level == "token"
        )
        rowwise = isinstance(self.surrogate, SequenceClip | Vespo | LinearBound) or self.group_loss is not None
        if per_token and (rowwise or self.aggregation == "balanced"):
            raise ValueError(
                f"advantage {self.advantage.name!r} differs by token, but this loss needs one per completion; nearest: "
                "surrogate 'sequence_token_clip'"
            )
        if any(isinstance(weight, OffPolicyMask) for weight in self.weights) and per_token:
            raise ValueError("the off-policy mask looks at the sign of one advantage per completion")
        if self.aggregation == "const" and self.length is not None and self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")


@dataclass(frozen=True)
class ExtraForward:
    """One more evaluation of the same tokens, without gradient, that the trainer is asked for.

    extra: its name in `TokenBatch.extra` ("ref": the field `ref_log_prob`). image: what the model is shown.
    model: whose weights. when: once per "rollout" batch, or at each "update".
    """

    extra: str
    image: Literal["same", "masked", "degraded"] = "same"
    model: Literal["policy", "old", "ref", "ema"] = "old"
    when: Literal["rollout", "update"] = "rollout"


def extra_forwards(preset: Preset) -> tuple[ExtraForward, ...]:
    """The further forwards that the preset's choices read, each once."""
    wanted = []
    choices = (*preset.reward_terms, *preset.transforms, *preset.weights, *preset.regularisers, preset.group_loss)
    for choice in choices:
        match choice:
            case Kl() | KlInReward() | Preference():
                wanted.append(ExtraForward("ref", model="ref"))
            case TopDependency() | TrajectoryDependency():
                wanted.append(ExtraForward("masked_image", image="masked"))
            case Perception():
                wanted.append(ExtraForward("degraded", image="degraded", model="policy", when="update"))
            case ConsistencyBonus():
                wanted.append(ExtraForward("ema", model="ema"))
            case _:
                pass
    return tuple(dict.fromkeys(wanted))


def changed(preset: Preset) -> dict[str, object]:
    """The fields of a preset that are not the defaults: what to print."""
    return {
        field.name: getattr(preset, field.name)
        for field in fields(preset)
        if getattr(preset, field.name) != field.default
    }
