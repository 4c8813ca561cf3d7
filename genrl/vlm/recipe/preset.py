"""A method for token policies, as the choices that it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from genrl.vlm.recipe import Choice
from genrl.vlm.recipe.advantages import Advantage
from genrl.vlm.recipe.losses import GroupLoss, Regulariser
from genrl.vlm.recipe.shaping import RewardTerm, Transform
from genrl.vlm.recipe.surrogates import Surrogate
from genrl.vlm.recipe.weights import OffPolicyMask, TokenWeight

Aggregation = Literal["seq_mean", "token_mean", "token_mean_global", "const", "seq_sum"]
"""`tokens.aggregate` has the formulas."""


class Contradiction(ValueError):
    """Choices that mean nothing together; `field` is the one to change."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


@dataclass(frozen=True)
class Preset:
    """A method: `aggregate(-weight * surrogate(advantage) + KL) + regularisers`, or a loss of whole groups.

    length: the divisor of aggregation "const", the longest completion allowed.
    warmup: with a critic, iterations at the start that train it alone. kl_stop: with a critic, the mean of l_old - l
    above which an iteration's updates end; None = they never do.
    output: `vlm.output` of the models that it is for; None = any.
    source: paper; notes: what belongs to the method and is not a setting of the loss, and what is our reading.
    Raises Contradiction for a combination that means nothing.
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
    warmup: int = 0
    kl_stop: float | None = None
    output: str | None = None
    source: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        if (self.surrogate is None) == (self.group_loss is None):
            raise Contradiction("surrogate", "a preset needs a surrogate or a group_loss, and not both")
        if self.group_loss is not None and self.weights:
            raise Contradiction("weights", "a group loss compares whole completions: token weights do not apply to it")
        if self.advantage.by_token and self.of_rows:
            raise Contradiction(
                "surrogate",
                f"advantage {self.advantage.name!r} differs by token, but this loss needs one per completion; nearest: "
                "surrogate 'sequence_token_clip'",
            )
        if any(isinstance(weight, OffPolicyMask) for weight in self.weights) and self.advantage.by_token:
            raise Contradiction("weights", "the off-policy mask looks at the sign of one advantage per completion")
        if self.aggregation == "const" and self.length is not None and self.length < 1:
            raise Contradiction("length", f"length must be at least 1, got {self.length}")

    @property
    def of_rows(self) -> str:
        """What needs one advantage per completion, the same for its tokens; "" where nothing does."""
        if self.group_loss is not None:
            return self.group_loss.name
        return self.surrogate.name if self.surrogate is not None and self.surrogate.of_rows else ""

    @property
    def choices(self) -> Iterator[Choice]:
        """All of them."""
        yield from (self.advantage, *self.reward_terms, *self.transforms, *self.weights, *self.regularisers)
        yield from (choice for choice in (self.surrogate, self.group_loss) if choice is not None)

    @property
    def reads(self) -> frozenset[str]:
        """What they read beside rewards and log-probabilities: names of `Choice.tensors`."""
        return frozenset(name for choice in self.choices for name in choice.reads)
