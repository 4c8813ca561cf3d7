"""From rewards to advantages: terms added to the rewards, estimators, and transforms of what they give."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.section import Count, Flag, NonNegative, Number, Text
from genrl.vlm.recipe.choice import Choice, Factor, lazily

if TYPE_CHECKING:
    from torch import Tensor

    from genrl.objectives.advantages import groups, reward_shaping
    from genrl.objectives.tokens import token_advantages, token_credit, token_weights
    from genrl.objectives.tokens import tokens as masking
    from genrl.vlm.rollout.token_batch import TokenBatch
else:
    groups = lazily("genrl.objectives.advantages.groups")
    reward_shaping = lazily("genrl.objectives.advantages.reward_shaping")
    token_credit = lazily("genrl.objectives.tokens.token_credit")
    token_advantages = lazily("genrl.objectives.tokens.token_advantages")
    token_weights = lazily("genrl.objectives.tokens.token_weights")
    masking = lazily("genrl.objectives.tokens.tokens")

# --- estimators


class Estimator(Choice):
    """From the rewards of a whole rollout batch to advantages."""

    @property
    def needs_group(self) -> bool:
        """Whether it compares the answers of a group, so that one answer to a question is not enough."""
        return True

    @property
    def by_token(self) -> bool:
        """Whether the tokens of a completion have advantages of their own, [B, T]."""
        return False

    def estimate(self, batch: TokenBatch) -> Tensor:
        """Advantages [B] or [B, T] of rewards to which the preset's terms have been added."""
        raise NotImplementedError


class GroupAdvantage(Estimator):
    """Reward less the mean of its group, over a sample standard deviation (`groups.group_advantages`)."""

    name: Literal["group"] = "group"
    scale: Literal["group", "global", "none"] = "group"
    """Whose deviation: of the group (GRPO), of the batch, or none (Dr. GRPO)."""
    eps: NonNegative = 1e-4
    """Added to the deviation (TRL: 1e-4, verl: 1e-6)."""

    def estimate(self, batch: TokenBatch) -> Tensor:
        return groups.group_advantages(batch.scores(self.name), batch.group, scale=self.scale, eps=self.eps, ddof=1)


class LeaveOneOut(Estimator):
    """Reward less the mean of the others of its group: RLOO (`token_advantages.leave_one_out`)."""

    name: Literal["leave_one_out"] = "leave_one_out"

    def estimate(self, batch: TokenBatch) -> Tensor:
        return token_advantages.leave_one_out(batch.scores(self.name), batch.group)


class GreedyBaseline(Estimator):
    """Reward less that of the most probable answer to the same question, [greedy] [B]: ReMax
    (`token_advantages.greedy_baseline`). No group is needed."""

    tensors = ("greedy",)
    needs_group: ClassVar[bool] = False
    name: Literal["greedy_baseline"] = "greedy_baseline"

    def estimate(self, batch: TokenBatch) -> Tensor:
        return token_advantages.greedy_baseline(batch.scores(self.name), batch.read("greedy", self.name))


class LengthWeighted(Estimator):
    """Reward less the mean of its group weighted by numbers of tokens: OPO (`token_advantages.length_weighted`)."""

    name: Literal["length_weighted"] = "length_weighted"

    def estimate(self, batch: TokenBatch) -> Tensor:
        return token_advantages.length_weighted(batch.scores(self.name), masking.token_count(batch.mask), batch.group)


class WhitenedReturns(Estimator):
    """Returns of [token_rewards], or of the row's reward at its last token, whitened over the tokens of the batch:
    REINFORCE++ (`token_advantages.reinforce_plus_plus`)."""

    by_token: ClassVar[bool] = True
    name: Literal["whitened_returns"] = "whitened_returns"
    baseline: Flag = False
    """Subtract the group's mean from the row's reward first (REINFORCE++-baseline)."""
    gamma: Factor = 1.0
    """Discount per token."""
    eps: NonNegative = 1e-8
    """Added to the variance."""
    population: Flag = False
    """Variance over all tokens (StableReinforce), not over the tokens less one (REINFORCE++'s code)."""

    @property
    def needs_group(self) -> bool:
        return self.baseline

    def estimate(self, batch: TokenBatch) -> Tensor:
        mask = batch.mask
        if "token_rewards" in batch.extra:
            if self.baseline:
                raise ValueError(
                    "a group baseline is subtracted from rewards [B]; this batch has extra['token_rewards']"
                )
            per_step = masking.masked(batch.extra["token_rewards"].double(), mask)
        else:
            rewards, mask = batch.scores(self.name), batch.scored  # a row without a score takes no part
            scores = groups.group_advantages(rewards, batch.group, scale="none") if self.baseline else rewards.double()
            # the whole reward comes with the token that ends the answer, and is discounted back from there
            last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
            per_step = masking.masked(scores.nan_to_num(nan=0.0)[:, None].expand(mask.shape), last)
        if "kl_reward" in batch.extra:  # `KlInReward` pays tokens here, since a return adds up what comes after one
            per_step = masking.masked(per_step + batch.extra["kl_reward"], mask)
        returns = token_advantages.token_returns(per_step, mask, gamma=self.gamma)
        return token_advantages.whitened(returns, mask, eps=self.eps, ddof=0 if self.population else 1)


class VirtualReward(Estimator):
    """z-score of a group with virtual samples of the best reward: NGRPO (`token_advantages.with_virtual_reward`)."""

    name: Literal["virtual_reward"] = "virtual_reward"
    best: Number = 1.0
    """Reward of a virtual sample: the most that an answer can get."""

    def estimate(self, batch: TokenBatch) -> Tensor:
        return token_advantages.with_virtual_reward(batch.scores(self.name), batch.group, best=self.best)


class SmoothedAdvantage(Estimator):
    """z-scores of this visit of a prompt and of all its visits: DCPO (`token_advantages.smoothed_advantages`). The
    statistics are part of a checkpoint."""

    name: Literal["smoothed"] = "smoothed"

    def estimate(self, batch: TokenBatch) -> Tensor:
        if batch.prompts is None:
            raise ValueError("the smoothed advantage keeps statistics by prompt: give estimate(..., prompts=...)")
        output = token_advantages.smoothed_advantages(batch.scores(self.name), batch.group, batch.prompts, batch.visits)
        batch.visits.update(output.visits)
        return output.advantage


class RankQuantiles(Estimator):
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

    def estimate(self, batch: TokenBatch) -> Tensor:
        ranked = batch.group if self.scope == "group" else batch.read("task", self.name)
        return token_advantages.rank_quantiles(batch.scores(self.name), ranked)


class NormaliseThenSum(Estimator):
    """Each reward a z-score in its group, then their sum with the weights of `rewards`: GDPO
    (`token_advantages.normalise_then_sum` of [components] [B, K])."""

    tensors = ("components",)
    name: Literal["normalise_then_sum"] = "normalise_then_sum"

    def estimate(self, batch: TokenBatch) -> Tensor:
        components = batch.read("components", self.name)
        # they come as rows, since only what has rows is gathered from other processes
        weights = batch.extra.get("component_weights")  # [B, K], every row the same
        each = [1.0] * components.shape[1] if weights is None else weights[0].tolist()
        return token_advantages.normalise_then_sum(components, each, batch.group)


class CriticAdvantage(Estimator):
    """Generalised advantages from a value function, [credit] [B] or [B, T] (`token_credit`): VL-DAC, POAD."""

    needs_group: ClassVar[bool] = False
    name: Literal["critic"] = "critic"
    level: Literal["step", "token", "every_token"] = "step"
    """Over environment steps, one row each (VL-DAC), over the tokens of actions (POAD), or over these with gamma
    discounting every token, as if each were a step (the token-level PPO that POAD is compared with)."""
    gamma: Factor = 0.95
    """Discount per environment step."""
    lam: Factor = 0.95
    """Factor of later errors of the critic, per step or per token."""

    @property
    def by_token(self) -> bool:
        return self.level != "step"

    def estimate(self, batch: TokenBatch) -> Tensor:
        return batch.read("credit", self.name).double()


class SemiOnline(Estimator):
    """Credit of turns whose actions are compared with an expert's, [turn], [turn_reward] and [matched] [B, T]: UI-S1
    (`token_credit.semi_online_advantages`)."""

    spread: ClassVar[float] = 0.3
    """Least standard deviation of a group's returns of turns; a group below is played again, from another start."""
    rounds: ClassVar[int] = 4
    """Times that a group is played at most; one that has too little spread then is trained on as it is."""
    tensors = ("turn", "turn_reward", "matched")
    by_token: ClassVar[bool] = True
    name: Literal["semi_online"] = "semi_online"
    gamma: Factor = 0.5
    """Discount of later rewards per turn, up to the next action that is not the expert's."""

    def estimate(self, batch: TokenBatch) -> Tensor:
        turns, rewards = turns_of(batch, self.name)
        row, place = batch.mask.bool().nonzero(as_tuple=True)
        matched = batch.read("matched", self.name)[row, place].bool()
        of_expert = rewards.new_zeros(rewards.shape).bool().index_put((row, turns[row, place]), matched)
        found = token_credit.semi_online_advantages(
            rewards, of_expert, batch.group, gamma=self.gamma, episode=1.0, step=1.0
        )
        return of_tokens(found, turns, batch)


class TurnLeaveOneOut(Estimator):
    """What the turns of an episode bring later, less the mean of the same turn in the others of its group, [turn] and
    [turn_reward] [B, T]: TRLOO (`token_credit.turn_leave_one_out`)."""

    tensors = ("turn", "turn_reward")
    by_token: ClassVar[bool] = True
    name: Literal["turn_leave_one_out"] = "turn_leave_one_out"
    gamma: Factor = 1.0
    """Discount of later rewards per turn."""

    def estimate(self, batch: TokenBatch) -> Tensor:
        turns, rewards = turns_of(batch, self.name)
        return of_tokens(token_credit.turn_leave_one_out(rewards, batch.group, gamma=self.gamma), turns, batch)


class Hierarchical(Estimator):
    """z-scores of the rewards [high] and [low] of an answer's two steps, for the tokens of either ([step]): Hi-GRPO
    (`token_advantages.hierarchical_advantages`)."""

    tensors = ("step",)
    by_token: ClassVar[bool] = True
    name: Literal["hierarchical"] = "hierarchical"

    def estimate(self, batch: TokenBatch) -> Tensor:
        high, low, step = (batch.read(name, self.name) for name in ("high", "low", "step"))
        each = token_advantages.hierarchical_advantages(high, low, batch.group, share=0.5)
        return each.high[:, None].where(step == 0, each.low[:, None])


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


def turns_of(batch: TokenBatch, reader: str) -> tuple[Tensor, Tensor]:
    """(turn of each token int64 [B, T], rewards of turns float64 [B, N], NaN where a row has fewer)."""
    turn, paid = (batch.read(name, reader) for name in ("turn", "turn_reward"))
    row, place = batch.mask.bool().nonzero(as_tuple=True)
    turn = turn.long()
    rewards = paid.new_full((len(turn), int(turn.max()) + 1), float("nan")).double()
    return turn, rewards.index_put((row, turn[row, place]), paid[row, place].double())


def of_tokens(advantage: Tensor, turn: Tensor, batch: TokenBatch) -> Tensor:
    """[B, T], of each token that of its turn, from those of turns [B, N]."""
    return masking.masked(advantage.gather(1, turn), batch.mask)


# --- added to the rewards before the estimator


class Term(Choice):
    """What is added to rewards before they become advantages."""

    def reward(self, batch: TokenBatch) -> Tensor:
        """[B], to add to the rewards of completions."""
        raise NotImplementedError


class LengthReward(Term):
    """A trapezoid of the number of tokens: 0, up to 1, and down to 0 (`reward_shaping.length_reward`)."""

    name: Literal["length"] = "length"
    thresholds: tuple[Number, Number, Number, Number]
    """Numbers of tokens at which it begins to rise, is 1, begins to fall, and is 0."""
    coefficient: Number = 1.0
    """Factor."""

    def reward(self, batch: TokenBatch) -> Tensor:
        return self.coefficient * reward_shaping.length_reward(masking.token_count(batch.mask), self.thresholds)


class OverlongPenalty(Term):
    """From 0 down to -1 over the last tokens allowed: DAPO (`reward_shaping.overlong_penalty`)."""

    name: Literal["overlong"] = "overlong"
    maximum: Count
    """Tokens at which it is -1 (DAPO: 20480)."""
    buffer: Count
    """Tokens before that at which it is 0 (DAPO: 4096)."""

    def reward(self, batch: TokenBatch) -> Tensor:
        return reward_shaping.overlong_penalty(
            masking.token_count(batch.mask), maximum=self.maximum, buffer=self.buffer
        )


class ConsistencyBonus(Term):
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

    def reward(self, batch: TokenBatch) -> Tensor:
        likely, answer, accuracy = (batch.read(name, self.name) for name in ("ema", "answer_mask", "accuracy"))
        confidence, constants = (
            reward_shaping.answer_confidence(likely, answer),
            {"coefficient": self.coefficient, "margin": self.margin},
        )
        return reward_shaping.consistency_bonus(accuracy, confidence, batch.group, **constants)


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
        return reward_shaping.with_kl(old.new_zeros(old.shape).double(), old, reference, batch.mask, beta=self.beta)


RewardTerm = LengthReward | OverlongPenalty | ConsistencyBonus | KlInReward

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
    """Times rows / rows of groups that have spread: GPG (`token_advantages.informative_rescaled`)."""

    name: Literal["informative_groups"] = "informative_groups"

    def changed(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        rows = advantage if advantage.dim() == 1 else masking.masked(advantage, batch.mask).abs().sum(1)
        return advantage * token_advantages.informative_factor(rows, batch.group)


Transform = BatchNormalise | SigmaFilter | Uncertainty | TrajectoryDependency | ClampAdvantage | InformativeGroups
