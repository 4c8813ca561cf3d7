"""Terms that are added to a loss."""

from __future__ import annotations

from typing import Literal

from genrl.config.section import Flag, NonNegative, Number, Positive
from genrl.vlm.recipe.choice import Choice


class Kl(Choice):
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


class EntropyPenalty(Choice):
    """The mean of -l over all tokens (`token_regularisers.sampled_entropy`): VPPO."""

    name: Literal["entropy_penalty"] = "entropy_penalty"
    coefficient: Number
    """Weight: positive lowers the entropy (VPPO: .06), negative is a bonus."""


class EntropyBonus(Choice):
    """Less the mean entropy of the distributions under the weights as they are, [policy_entropy] [B, T]: POAD. Unlike
    `entropy_penalty`, which sees one sample, it has a gradient in expectation on policy."""

    tensors = ("entropy",)
    name: Literal["entropy_bonus"] = "entropy_bonus"
    coefficient: Number = 0.01
    """Weight."""


class EntropyBand(Choice):
    """What the mean of -l of each task ([task] [B]; one task where it is not given) lies outside of a band:
    OpenVLThinkerV2, SPINE (`token_regularisers.entropy_band`)."""

    name: Literal["entropy_band"] = "entropy_band"
    coefficient: Number
    """Weight."""
    low: Number
    """Lower end of the band."""
    high: Number
    """Upper end of the band."""
    bounds: Literal["absolute", "quantile"] = "absolute"
    """The ends are entropies of all tokens (OpenVLThinkerV2), or quantiles of the [entropy] of those whose weight is
    not 0 (SPINE)."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ("entropy",) if self.bounds == "quantile" else ()


class Perception(Choice):
    """Answers must depend on how the picture is degraded, [degraded]: Q-Hawkeye (`token_regularisers.perception_loss`).
    Rows in which that is NaN have no degraded twin."""

    tensors = ("degraded",)
    name: Literal["perception"] = "perception"
    gamma: NonNegative = 1e-4
    """Weight of the distance to what the degraded picture gives; it falls to 0 over the run."""
    eta: NonNegative = 1e-3
    """Weight of the log-probabilities of the answers."""


class ValueLoss(Choice):
    """The critic's clipped squared error, of [value], [old_value] and [returns], [B] or [B, T]: VL-DAC, POAD
    (`token_regularisers.clipped_value_loss`)."""

    name: Literal["value"] = "value"
    coefficient: NonNegative = 0.5
    """Weight."""
    clip: Positive = 0.1
    """How far a value may move from the old one."""


Regulariser = Kl | EntropyPenalty | EntropyBonus | EntropyBand | Perception | ValueLoss
