"""Weights of tokens, which are multiplied."""

from __future__ import annotations

from typing import Literal

from genrl.config.section import NonNegative, Number, Positive, Share
from genrl.vlm.recipe.choice import Choice


class TopEntropy(Choice):
    """1 for the tokens of highest [entropy], 0 for the others: forking tokens, SPINE."""

    tensors = ("entropy",)
    name: Literal["top_entropy"] = "top_entropy"
    share: Share = 0.2
    """Share of the tokens that are trained."""
    scope: Literal["batch", "row"] = "batch"
    """Of the tokens of the batch (`token_weights.top_entropy`), or of each row (`token_weights.top_of_row`)."""


class TopDependency(Choice):
    """1 for the tokens of a row that depend most on the picture, by [masked_image]: VPPO (`token_weights.top_of_row` of
    `visual_dependency`)."""

    tensors = ("masked_image",)
    name: Literal["top_dependency"] = "top_dependency"
    share: Share = 0.4
    """Share of a row's tokens that are trained."""


class Divergence(Choice):
    """From 1 to 1.7, by how much a group disagrees on the next token, [divergence]: TW-GRPO
    (`token_weights.divergence_weights`)."""

    tensors = ("divergence",)
    name: Literal["divergence"] = "divergence"


class ClipCov(Choice):
    """0 for a few tokens, drawn at random ([draw]), whose covariance of log-probability and advantage is large, 1 for
    the others: Clip-Cov (`token_covariance`)."""

    tensors = ("draw",)
    name: Literal["clip_cov"] = "clip_cov"
    share: Share = 2e-4
    """Share of the tokens that are left out."""
    low: NonNegative = 1.0
    """They have a covariance above this."""
    high: NonNegative = 5.0
    """They have a covariance below this."""


class EngineMismatch(Choice):
    """`exp(l_old - l_sampler)`, for the engine that sampled (`token_weights.mismatch_weights`). TRL: sequence, mask, 3;
    truncated importance sampling: token, truncate, 2; IcePop: token, mask, from .5 to 5."""

    name: Literal["engine_mismatch"] = "engine_mismatch"
    level: Literal["token", "sequence", "sequence_geo"] = "sequence"
    """Of each token, of the row, or of the row with its length taken out."""
    mode: Literal["truncate", "mask"] = "mask"
    """Outside of the limits: the limit, or 0."""
    low: NonNegative = 0.0
    """Lower limit (IcePop: .5)."""
    high: Positive = 3.0
    """Upper limit (TRL: 3; PARA-GRPO and IcePop: 5)."""


class OffPolicyMask(Choice):
    """0 for rows of negative advantage that the policy has moved away from: DeepSeek-V3.2
    (`token_weights.off_policy_mask`, for each update anew)."""

    name: Literal["off_policy_mask"] = "off_policy_mask"
    threshold: Number
    """Mean of l_sampler - l above which a row is left out."""


class StepMeans(Choice):
    """Tokens / tokens of this step, by [step]: with aggregation token_mean_global the sum of the steps' own means, two
    separate losses (Hi-GRPO)."""

    tensors = ("step",)
    name: Literal["step_means"] = "step_means"


TokenWeight = TopEntropy | TopDependency | Divergence | ClipCov | EngineMismatch | OffPolicyMask | StepMeans
