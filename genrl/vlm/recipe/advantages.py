"""From rewards to advantages: terms added to the rewards, estimators, and transforms of what they give."""

from __future__ import annotations

from typing import ClassVar, Literal

from genrl.config.section import Count, Flag, NonNegative, Number, Text
from genrl.vlm.recipe.choice import Choice, Factor

# --- estimators: rewards of the whole rollout batch -> [B] or [B, T]


class GroupAdvantage(Choice):
    """Reward less the mean of its group, over a sample standard deviation (`groups.group_advantages`)."""

    name: Literal["group"] = "group"
    scale: Literal["group", "global", "none"] = "group"
    """Whose deviation: of the group (GRPO), of the batch, or none (Dr. GRPO)."""
    eps: NonNegative = 1e-4
    """Added to the deviation (TRL: 1e-4, verl: 1e-6)."""


class LeaveOneOut(Choice):
    """Reward less the mean of the others of its group: RLOO (`token_advantages.leave_one_out`)."""

    name: Literal["leave_one_out"] = "leave_one_out"


class GreedyBaseline(Choice):
    """Reward less that of the most probable answer to the same question, [greedy] [B]: ReMax
    (`token_advantages.greedy_baseline`). No group is needed."""

    tensors = ("greedy",)
    name: Literal["greedy_baseline"] = "greedy_baseline"


class LengthWeighted(Choice):
    """Reward less the mean of its group weighted by numbers of tokens: OPO (`token_advantages.length_weighted`)."""

    name: Literal["length_weighted"] = "length_weighted"


class WhitenedReturns(Choice):
    """Returns of [token_rewards], or of the row's reward at its last token, whitened over the tokens of the batch:
    REINFORCE++ (`token_advantages.reinforce_plus_plus`)."""

    name: Literal["whitened_returns"] = "whitened_returns"
    baseline: Flag = False
    """Subtract the group's mean from the row's reward first (REINFORCE++-baseline)."""
    gamma: Factor = 1.0
    """Discount per token."""
    eps: NonNegative = 1e-8
    """Added to the variance."""


class VirtualReward(Choice):
    """z-score of a group with virtual samples of the best reward: NGRPO (`token_advantages.with_virtual_reward`)."""

    name: Literal["virtual_reward"] = "virtual_reward"
    best: Number = 1.0
    """Reward of a virtual sample: the most that an answer can get."""


class SmoothedAdvantage(Choice):
    """z-scores of this visit of a prompt and of all its visits: DCPO (`token_advantages.smoothed_advantages`). The
    statistics are part of a checkpoint."""

    name: Literal["smoothed"] = "smoothed"


class RankQuantiles(Choice):
    """Standard normal quantiles of ranks within a group or a task: G2RPO (`token_advantages.rank_quantiles`). With
    scope task it reads [task] [B]."""

    name: Literal["rank_quantiles"] = "rank_quantiles"
    scope: Literal["group", "task"] = "group"
    """Ranked are the answers to a question, or all of the iteration to the questions of a task."""
    column: Text = "task"
    """With scope task: the column that names a question's task (generated tasks: `question`)."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ("task",) if self.scope == "task" else ()


class NormaliseThenSum(Choice):
    """Each reward a z-score in its group, then their sum with the weights of `rewards`: GDPO
    (`token_advantages.normalise_then_sum` of [components] [B, K])."""

    tensors = ("components",)
    name: Literal["normalise_then_sum"] = "normalise_then_sum"


class CriticAdvantage(Choice):
    """Generalised advantages from a value function, [credit] [B] or [B, T] (`token_credit`): VL-DAC, POAD."""

    name: Literal["critic"] = "critic"
    level: Literal["step", "token"] = "step"
    """Over environment steps, one row each (VL-DAC), or over the tokens of actions (POAD)."""
    gamma: Factor = 0.95
    """Discount per environment step."""
    lam: Factor = 0.95
    """Factor of later errors of the critic, per step or per token."""
    every_token: Flag = False
    """With tokens: gamma discounts every token, as if each were a step (the token-level PPO that POAD is compared
    with)."""


class SemiOnline(Choice):
    """Credit of turns whose actions are compared with an expert's, [turn], [turn_reward] and [matched] [B, T]: UI-S1
    (`semi_online.semi_online_advantages`)."""

    tensors = ("turn", "turn_reward", "matched")
    name: Literal["semi_online"] = "semi_online"
    gamma: Factor = 0.5
    """Discount of later rewards per turn, up to the next action that is not the expert's."""
    episode: NonNegative = 1.0
    """Weight of the advantage of the whole episode."""
    step: NonNegative = 1.0
    """Weight of the advantage of the turn."""
    spread: NonNegative = 0.3
    """Least standard deviation of a group's returns of turns; a group below is played again, from another start."""
    rounds: Count = 4
    """Times that a group is played at most; one that has too little spread then is trained on as it is."""


class TurnLeaveOneOut(Choice):
    """What the turns of an episode bring later, less the mean of the same turn in the others of its group, [turn] and
    [turn_reward] [B, T]: TRLOO (`turn_credit.turn_leave_one_out`)."""

    tensors = ("turn", "turn_reward")
    name: Literal["turn_leave_one_out"] = "turn_leave_one_out"
    gamma: Factor = 1.0
    """Discount of later rewards per turn."""


class Hierarchical(Choice):
    """z-scores of the rewards [high] and [low] of an answer's two steps, for the tokens of either ([step]): Hi-GRPO
    (`token_advantages.hierarchical_advantages`)."""

    tensors = ("step",)
    name: Literal["hierarchical"] = "hierarchical"
    share: NonNegative = 0.5
    """Weight of the second step's reward in that of the first."""


Advantage = (
    GroupAdvantage
    | LeaveOneOut
    | LengthWeighted
    | GreedyBaseline
    | WhitenedReturns
    | VirtualReward
    | SmoothedAdvantage
    | RankQuantiles
    | NormaliseThenSum
    | CriticAdvantage
    | SemiOnline
    | TurnLeaveOneOut
    | Hierarchical
)

# --- added to the rewards before the estimator


class LengthReward(Choice):
    """A trapezoid of the number of tokens: 0, up to 1, and down to 0 (`reward_shaping.length_reward`)."""

    name: Literal["length"] = "length"
    thresholds: tuple[Number, Number, Number, Number]
    """Numbers of tokens at which it begins to rise, is 1, begins to fall, and is 0."""
    coefficient: Number = 1.0
    """Factor."""


class OverlongPenalty(Choice):
    """From 0 down to -1 over the last tokens allowed: DAPO (`reward_shaping.overlong_penalty`)."""

    name: Literal["overlong"] = "overlong"
    maximum: Count
    """Tokens at which it is -1 (DAPO: 20480)."""
    buffer: Count
    """Tokens before that at which it is 0 (DAPO: 4096)."""


class ConsistencyBonus(Choice):
    """For right answers that a moving average of the model finds likely after the reasoning: GRPO-CARE
    (`reward_shaping.consistency_bonus` of [accuracy] [B], [ema] and [answer_mask])."""

    average: ClassVar[tuple[float, int]] = 0.995, 10
    """Share of the average that an update keeps, and optimiser steps between updates."""
    tensors = ("ema",)
    name: Literal["consistency"] = "consistency"
    coefficient: Number = 0.5
    """Bonus of an accuracy of 1."""
    margin: Number = 0.0
    """How far below the mean of the group's right answers the likelihood may lie (general video: .01)."""


class KlInReward(Choice):
    """`-beta (l_old - l_ref)`: per token for whitened_returns, else summed over the row."""

    tensors = ("ref",)
    name: Literal["kl_in_reward"] = "kl_in_reward"
    beta: NonNegative
    """Weight (RLOO in TRL: .05, REINFORCE++ in OpenRLHF: .01)."""


RewardTerm = LengthReward | OverlongPenalty | ConsistencyBonus | KlInReward

# --- transforms of advantages, in order


class BatchNormalise(Choice):
    """z-scores over the batch (`token_advantages.batch_normalised`)."""

    name: Literal["batch_normalise"] = "batch_normalise"


class SigmaFilter(Choice):
    """Advantages far from the mean become 0: StableReinforce (`token_advantages.sigma_filtered`)."""

    name: Literal["sigma_filter"] = "sigma_filter"
    limit: NonNegative = 3.0
    """Standard deviations that are kept."""


class Uncertainty(Choice):
    """Times `exp(-0.2 u)`, u the scatter of the scores from 1 to 5 that a group wrote, [scores] [B]: Q-Hawkeye
    (`token_advantages.score_uncertainty`)."""

    tensors = ("scores",)
    name: Literal["uncertainty"] = "uncertainty"


class TrajectoryDependency(Choice):
    """Times a factor, .9 or more, that grows with how much an answer depends on its picture, [masked_image]: VPPO
    (`token_advantages.trajectory_weight`)."""

    tensors = ("masked_image",)
    name: Literal["trajectory_dependency"] = "trajectory_dependency"


class ClampAdvantage(Choice):
    """No larger than a limit on either side."""

    name: Literal["clamp"] = "clamp"
    limit: NonNegative
    """Largest absolute advantage."""


class PositiveOnly(Choice):
    """Negative advantages become 0."""

    name: Literal["positive_only"] = "positive_only"


class InformativeGroups(Choice):
    """Times rows / rows of groups that have spread: GPG (`token_advantages.informative_rescaled`)."""

    name: Literal["informative_groups"] = "informative_groups"


Transform = (
    BatchNormalise
    | SigmaFilter
    | Uncertainty
    | TrajectoryDependency
    | ClampAdvantage
    | PositiveOnly
    | InformativeGroups
)
