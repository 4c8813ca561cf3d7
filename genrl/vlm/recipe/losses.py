"""Losses beside a surrogate and in its place: terms that are added to it, and losses of whole groups
(`genrl.objectives.token_surrogates`) in place of weights, surrogate and aggregation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.section import Flag, NonNegative, Number, Positive, Range
from genrl.vlm.recipe import Choice, lazily

if TYPE_CHECKING:
    from torch import Tensor

    from genrl.objectives import groups, policy_losses, preferences, token_regularisers, token_surrogates, tokens
    from genrl.vlm.rollout.token_batch import TokenBatch

    Aggregated = Callable[[Tensor], Tensor]
    """From terms [B, T] to one number, as the preset has it for the surrogate."""
    Measured = tuple[Tensor, dict[str, Tensor]]
    """The term, [], and what else was measured of it, without gradient."""
else:
    # On first use: `check` reads these classes as a part of the configuration, without torch.
    groups = lazily("genrl.objectives.groups")
    preferences = lazily("genrl.objectives.preferences")
    policy_losses = lazily("genrl.objectives.policy_losses")
    token_regularisers = lazily("genrl.objectives.token_regularisers")
    token_surrogates = lazily("genrl.objectives.token_surrogates")
    tokens = lazily("genrl.objectives.tokens")


class Added(Choice):
    """A term of the loss beside the surrogate."""

    def value(self, batch: TokenBatch, aggregated: Aggregated) -> Measured:
        """The term of a micro-batch; gradient through `batch.log_prob`."""
        raise NotImplementedError


class Kl(Added):
    """An estimate per token of the KL to the model before training. It is aggregated as the surrogate is."""

    tensors = ("ref",)
    name: Literal["kl"] = "kl"
    beta: NonNegative = 0.04
    """Weight (GRPO: .04)."""
    estimator: Literal["k2", "k3", "k3_clamped"] = "k3"
    """Half the squared difference, exp(d) - d - 1, or that with verl's limits."""
    weighted: Flag = False
    """Multiply it by the weights of the tokens, too (TW-GRPO)."""
    corrected: Flag = False
    """Multiply it by the ratio, so that its gradient is that of the KL itself (DeepSeek-V3.2, TRL's default)."""

    def value(self, batch: TokenBatch, aggregated: Aggregated) -> Measured:
        log_prob, old, _, mask = batch.terms
        estimate = {
            "k2": policy_losses.kl_k2,
            "k3": policy_losses.kl_k3,
            "k3_clamped": token_regularisers.kl_k3_clamped,
        }[self.estimator]
        kl = estimate(tokens.masked(log_prob, mask), tokens.masked(batch.read("ref_log_prob", self.name), mask))
        measured = {f"kl_{self.estimator}": tokens.token_mean(kl.detach(), mask)}
        if self.corrected:
            # The estimate is of samples of the old policy: the ratio makes it one of the present policy, gradient
            # included.
            kl = kl * tokens.log_ratio(log_prob, old, mask).exp()
        if self.weighted and batch.weight is not None:
            kl = kl * batch.weight
        return self.beta * aggregated(kl), measured


class EntropyPenalty(Added):
    """The mean of -l over all tokens (`token_regularisers.sampled_entropy`): VPPO."""

    name: Literal["entropy_penalty"] = "entropy_penalty"
    coefficient: Number
    """Weight: positive lowers the entropy (VPPO: .06), negative is a bonus."""

    def value(self, batch: TokenBatch, aggregated: Aggregated) -> Measured:
        terms = -tokens.masked(batch.terms[0], batch.mask)
        return self.coefficient * tokens.aggregate(terms, batch.mask, "token_mean_global", tokens=batch.tokens), {}


class EntropyBonus(Added):
    """Less the mean entropy of the distributions under the weights as they are, [policy_entropy] [B, T]: POAD. Unlike
    `entropy_penalty`, which sees one sample, it has a gradient in expectation on policy."""

    tensors = ("entropy",)
    name: Literal["entropy_bonus"] = "entropy_bonus"
    coefficient: Number = 0.01
    """Weight."""

    def value(self, batch: TokenBatch, aggregated: Aggregated) -> Measured:
        entropy = tokens.masked(batch.read("policy_entropy", self.name), batch.mask)
        total = tokens.aggregate(entropy, batch.mask, "token_mean_global", tokens=batch.tokens)
        return -self.coefficient * total, {"policy_entropy": tokens.token_mean(entropy.detach(), batch.mask)}


class EntropyBand(Added):
    """What the mean of -l of each task ([task] [B]; one task where it is not given) lies outside of a band:
    OpenVLThinkerV2, SPINE (`token_regularisers.entropy_band`)."""

    name: Literal["entropy_band"] = "entropy_band"
    coefficient: Number
    """Weight."""
    band: Range
    """[lower end, upper end] of the band."""
    bounds: Literal["absolute", "quantile"] = "absolute"
    """The ends are entropies of all tokens (OpenVLThinkerV2), or quantiles of the [entropy] of those whose weight is
    not 0 (SPINE)."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ("entropy",) if self.bounds == "quantile" else ()

    def prepared(self, batch: TokenBatch) -> dict[str, Tensor]:
        if self.bounds != "quantile":
            return {}
        chosen = batch.read("entropy", self.name)[self.tokens(batch)].double()
        ends = tokens.quantiles(chosen, self.band)
        return {"entropy_bounds": ends.expand(len(batch.mask), 2)}

    def tokens(self, batch: TokenBatch) -> Tensor:
        """The tokens that it looks at, bool [B, T]."""
        mask = batch.mask.bool()
        return mask & (batch.weight != 0) if self.bounds == "quantile" and batch.weight is not None else mask

    def value(self, batch: TokenBatch, aggregated: Aggregated) -> Measured:
        import torch

        low, high = self.band
        if "entropy_bounds" in batch.extra:
            low, high = batch.extra["entropy_bounds"][0].tolist()
        tokens, tasks = self.tokens(batch), batch.extra.get("task", batch.group.new_zeros(batch.group.shape))
        costs = []
        for number in sorted(set(tasks.tolist())):
            entropy = token_regularisers.sampled_entropy(batch.terms[0], tokens & (tasks == number)[:, None])
            # Weighted by the task's rows of the step, so that micro-batches add up to one loss.
            costs.append((tasks == number).sum() / batch.number * token_regularisers.entropy_band(entropy, low, high))
        return self.coefficient * torch.stack(costs).sum(), {}


class Perception(Added):
    """Answers must depend on how the picture is degraded, [degraded]: Q-Hawkeye (`token_regularisers.perception_loss`).
    Rows in which that is NaN have no degraded twin."""

    tensors = ("degraded",)
    name: Literal["perception"] = "perception"
    eta: ClassVar[float] = 1e-3
    """Weight of the log-probabilities of the answers (Q-Hawkeye: 1e-3)."""
    coefficient: NonNegative = 1e-4
    """Weight of the distance to what the degraded picture gives; it falls to 0 over the run."""

    def value(self, batch: TokenBatch, aggregated: Aggregated) -> Measured:
        log_prob, mask, degraded = batch.terms[0], batch.mask.bool(), batch.read("degraded", self.name)
        twins = mask & ~(degraded.isnan() & mask).any(dim=1, keepdim=True)
        return token_regularisers.perception_loss(
            log_prob, degraded, twins, gamma=self.coefficient, eta=self.eta, rows=batch.number
        ), {}


class ValueLoss(Added):
    """The critic's clipped squared error, of [value], [old_value] and [returns], [B] or [B, T]: VL-DAC, POAD
    (`token_regularisers.clipped_value_loss`)."""

    name: Literal["value"] = "value"
    coefficient: NonNegative = 0.5
    """Weight."""
    clip: Positive = 0.1
    """How far a value may move from the old one."""

    def value(self, batch: TokenBatch, aggregated: Aggregated) -> Measured:
        value, before, returns = (batch.read(name, self.name) for name in ("value", "old_value", "returns"))
        if value.dim() == 1:
            squares = token_regularisers.clipped_value_loss(value, before, returns.to(value.dtype), clip=self.clip)
            return self.coefficient * squares.sum() / batch.number, {}
        arguments = (tokens.masked(tensor.to(value.dtype), batch.mask) for tensor in (value, before, returns))
        squares = token_regularisers.clipped_value_loss(*arguments, clip=self.clip)
        return self.coefficient * tokens.aggregate(squares, batch.mask, "token_mean_global", tokens=batch.tokens), {}


Regulariser = Kl | EntropyPenalty | EntropyBonus | EntropyBand | Perception | ValueLoss


class WholeGroups(Choice):
    """A loss of whole groups."""

    def loss(self, batch: TokenBatch, scored: Tensor) -> Tensor:
        """This micro-batch's part of the step's loss, []. scored: the rows that have rewards, bool [B]: of advantage 0,
        one without would be taught as no better than its group."""
        raise NotImplementedError


class Regression(WholeGroups):
    """Log-ratios regressed on advantages: Reg-GRPO (`token_surrogates.regression_loss`)."""

    name: Literal["regression"] = "regression"

    def loss(self, batch: TokenBatch, scored: Tensor) -> Tensor:
        log_prob, old, advantage, mask = batch.terms
        ratio = tokens.sequence_log_ratio(log_prob, old, mask)[scored]
        return token_surrogates.regression_loss(ratio, advantage[scored], batch.group[scored]).sum() / batch.number


class Classification(WholeGroups):
    """Answers of positive advantage told from the others: REAL (`token_surrogates.classification_loss`)."""

    name: Literal["classification"] = "classification"

    def loss(self, batch: TokenBatch, scored: Tensor) -> Tensor:
        log_prob, old, advantage, mask = batch.terms
        score = tokens.mean_log_ratio(log_prob, old, mask)[scored]
        return (
            token_surrogates.classification_loss(score, advantage[scored] > 0, batch.group[scored]).sum()
            / batch.number_of_groups
        )


class Preference(WholeGroups):
    """DPO on the best and the worst answer of each group (`preferences.pair_loss`). A group without spread has no pair,
    and counts in the mean."""

    tensors = ("ref",)
    name: Literal["preference"] = "preference"
    beta: Positive = 0.1
    """Weight of the log-ratios to the model before training."""

    def loss(self, batch: TokenBatch, scored: Tensor) -> Tensor:
        sign = groups.best_and_worst(batch.scores(self.name), batch.group)
        best, worst = ((sign == side).nonzero()[:, 0] for side in (1, -1))  # by group, since rows of one are together
        now = tokens.row_sum(batch.terms[0], batch.mask)
        gain = now - tokens.row_sum(batch.read("ref_log_prob", self.name), batch.mask)
        return (
            preferences.pair_loss("sigmoid", gain[best], gain[worst], beta=self.beta).loss.sum()
            / batch.number_of_groups
        )


class RightAnswers(WholeGroups):
    """Right answers told from the others by the log-ratios of a group, as a classifier: PACS
    (`token_surrogates.right_answer_loss` of [right])."""

    tensors = ("right",)
    name: Literal["right_answers"] = "right_answers"
    beta: Positive = 1.0
    """Factor of the log-ratios."""

    def loss(self, batch: TokenBatch, scored: Tensor) -> Tensor:
        log_prob, old, _, mask = batch.terms
        ratio = tokens.sequence_log_ratio(log_prob, old, mask)[scored]
        right = batch.read("right", self.name)[scored] > 0
        return token_surrogates.right_answer_loss(self.beta * ratio, right, batch.group[scored]).sum() / batch.number


GroupLoss = Regression | Classification | Preference | RightAnswers
