"""Losses of whole groups (`genrl.objectives.token_surrogates`), in place of weights, surrogate and aggregation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from genrl.config.section import Flag, Positive
from genrl.vlm.recipe.choice import Choice, lazily

if TYPE_CHECKING:
    from torch import Tensor

    from genrl.objectives import groups, preferences, token_surrogates
    from genrl.objectives import tokens as masking
    from genrl.vlm.rollout.token_batch import TokenBatch
else:
    groups = lazily("genrl.objectives.groups")
    preferences = lazily("genrl.objectives.preferences")
    token_surrogates = lazily("genrl.objectives.token_surrogates")
    masking = lazily("genrl.objectives.tokens")


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
        ratio = masking.sequence_log_ratio(log_prob, old, mask)[scored]
        return token_surrogates.regression_loss(ratio, advantage[scored], batch.group[scored]).sum() / batch.number


class Classification(WholeGroups):
    """Answers of positive advantage told from the others: REAL (`token_surrogates.classification_loss`)."""

    name: Literal["classification"] = "classification"

    def loss(self, batch: TokenBatch, scored: Tensor) -> Tensor:
        log_prob, old, advantage, mask = batch.terms
        score = masking.mean_log_ratio(log_prob, old, mask)[scored]
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
        now = masking.row_sum(batch.terms[0], batch.mask)
        gain = now - masking.row_sum(batch.read("ref_log_prob", self.name), batch.mask)
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
    compare: Literal["others", "group", "none"] = "others"
    """An answer's logit less the mean of the others', as a z-score of the group, or as it is."""
    balanced: Flag = False
    """The right and the wrong answers to a question weigh the same together."""

    def loss(self, batch: TokenBatch, scored: Tensor) -> Tensor:
        log_prob, old, _, mask = batch.terms
        ratio = masking.sequence_log_ratio(log_prob, old, mask)[scored]
        right = batch.read("right", self.name)[scored] > 0
        losses = token_surrogates.right_answer_loss(
            self.beta * ratio, right, batch.group[scored], compare=self.compare, balanced=self.balanced
        )
        return losses.sum() / batch.number


GroupLoss = Regression | Classification | Preference | RightAnswers
