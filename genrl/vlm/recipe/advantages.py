"""Estimators: from rewards to advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.section import Count, NonNegative, Number, Text
from genrl.vlm.recipe import Choice, Factor, lazily

if TYPE_CHECKING:
    from torch import Tensor

    from genrl.objectives import groups, token_advantages, token_credit
    from genrl.objectives import tokens as masking
    from genrl.vlm.rollout.token_batch import TokenBatch
else:
    # On first use: `check` reads these classes as a part of the configuration, without torch.
    groups = lazily("genrl.objectives.groups")
    token_credit = lazily("genrl.objectives.token_credit")
    token_advantages = lazily("genrl.objectives.token_advantages")
    masking = lazily("genrl.objectives.tokens")


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


class PrefixTree(GroupAdvantage):
    """`group`, and at a token where answers part that began alike, by how much the mean of those that go on with it is
    above the mean of all of these: TEMPO (`token_credit.branch_credit` of [ids])."""

    tensors = ("ids",)
    by_token: ClassVar[bool] = True
    name: Literal["prefix_tree"] = "prefix_tree"  # type: ignore[assignment]

    def estimate(self, batch: TokenBatch) -> Tensor:
        plain = super().estimate(batch)
        # of z-scores, so that a deviation of the rewards divides both terms
        scored = plain.masked_fill(batch.scores(self.name).isnan(), float("nan"))
        credit = token_credit.branch_credit(scored, batch.read("ids", self.name), batch.mask, batch.group)
        return masking.masked(plain[:, None] + credit, batch.mask)


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
    REINFORCE++ (`token_advantages.token_returns`, `whitened`)."""

    by_token: ClassVar[bool] = True
    needs_group: ClassVar[bool] = False
    ddof: ClassVar[int] = 1
    """What is taken off the number of tokens under the variance (REINFORCE++'s code: 1)."""
    name: Literal["whitened_returns"] = "whitened_returns"
    gamma: Factor = 1.0
    """Discount per token."""
    eps: NonNegative = 1e-8
    """Added to the variance."""

    def estimate(self, batch: TokenBatch) -> Tensor:
        mask = batch.mask
        if "token_rewards" in batch.extra:
            if self.needs_group:
                raise ValueError(
                    "a group baseline is subtracted from rewards [B]; this batch has extra['token_rewards']"
                )
            per_step = masking.masked(batch.extra["token_rewards"].double(), mask)
        else:
            rewards, mask = batch.scores(self.name), batch.scored  # a row without a score takes no part
            scores = (
                groups.group_advantages(rewards, batch.group, scale="none") if self.needs_group else rewards.double()
            )
            # the whole reward comes with the token that ends the answer, and is discounted back from there
            last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
            per_step = masking.masked(scores.nan_to_num(nan=0.0)[:, None].expand(mask.shape), last)
        if "kl_reward" in batch.extra:  # `KlInReward` pays tokens here, since a return adds up what comes after one
            per_step = masking.masked(per_step + batch.extra["kl_reward"], mask)
        returns = token_advantages.token_returns(per_step, mask, gamma=self.gamma)
        return token_advantages.whitened(returns, mask, eps=self.eps, ddof=self.ddof)


class WhitenedGroups(WhitenedReturns):
    """`whitened_returns` of the row's reward less the mean of its group: REINFORCE++-baseline."""

    needs_group: ClassVar[bool] = True
    name: Literal["whitened_groups"] = "whitened_groups"  # type: ignore[assignment]


class WhitenedPopulation(WhitenedReturns):
    """`whitened_returns` over the variance of all tokens, without an addend: StableReinforce."""

    ddof: ClassVar[int] = 0
    name: Literal["whitened_population"] = "whitened_population"  # type: ignore[assignment]
    eps: NonNegative = 0.0
    """Added to the variance."""


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
    a column of tasks it reads [task] [B]."""

    name: Literal["rank_quantiles"] = "rank_quantiles"
    task: Text | None = None
    """Column that names a question's task (generated tasks: `question`): ranked are all answers of the iteration to the
    questions of one task; null = the answers to one question."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ("task",) if self.task is not None else ()

    def estimate(self, batch: TokenBatch) -> Tensor:
        ranked = batch.group if self.task is None else batch.read("task", self.name)
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
    """Factor of later errors of the critic, per step, token or macro action."""
    macro: Count = 1
    """Tokens of a macro action, whose values are averaged and which share an advantage; an action's last token is one
    by itself (MA-RLHF: 5). A step has none."""

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
        by_turn = token_credit.semi_online_advantages(
            rewards, of_expert, batch.group, gamma=self.gamma, episode=1.0, step=1.0
        )
        return of_tokens(by_turn, turns, batch)


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


class Signed(Estimator):
    """One advantage of right answers and one of the others, without a baseline: NSR, W-REINFORCE
    (`token_advantages.signed` of [right]). No group is needed."""

    tensors = ("right",)
    needs_group: ClassVar[bool] = False
    name: Literal["signed"] = "signed"
    pays: tuple[Number, Number] = (0.0, -1.0)
    """Advantages of right answers (W-REINFORCE: .1) and of the others; rows of 0 are left out of a mean over tokens."""

    def estimate(self, batch: TokenBatch) -> Tensor:
        right, tokens = batch.read("right", self.name), masking.token_count(batch.mask)
        scored = ~batch.scores(self.name).isnan()  # the others are neither right nor wrong
        advantage = right.new_zeros(len(right)).double()
        positive, negative = self.pays
        advantage[scored] = token_advantages.signed(right[scored], tokens[scored], positive=positive, negative=negative)
        return advantage


class TokenStatistics(Estimator):
    """Reward less the mean over the tokens of its group, over their standard deviation; of the answers, where a long
    one would get 5 or more: HAPO (`token_advantages.over_tokens`)."""

    name: Literal["token_statistics"] = "token_statistics"

    def estimate(self, batch: TokenBatch) -> Tensor:
        return token_advantages.over_tokens(batch.scores(self.name), masking.token_count(batch.mask), batch.group)


Advantage = (
    GroupAdvantage
    | PrefixTree
    | LeaveOneOut
    | LengthWeighted
    | GreedyBaseline
    | WhitenedReturns
    | WhitenedGroups
    | WhitenedPopulation
    | VirtualReward
    | SmoothedAdvantage
    | RankQuantiles
    | NormaliseThenSum
    | CriticAdvantage
    | SemiOnline
    | TurnLeaveOneOut
    | Hierarchical
    | Signed
    | TokenStatistics
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
