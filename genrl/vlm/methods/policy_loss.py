"""From a preset and the tensors of a rollout to a loss: `estimate` per rollout batch, `policy_loss` per micro-batch.

    rollout = estimate(preset, TokenBatch(mask=..., group=..., rewards=..., old_log_prob=...)).batch
    for part in micro_batches(rollout, size):                  # no gradient up to here
        policy_loss(preset, part.with_log_prob(model(...))).loss.backward()

All statistics (group and batch means, whitening, quantiles, min-max) are made by `estimate`, over all rows of all
processes. The sum of the micro-batches' losses is the loss of the step. Shapes and masks as in `objectives.tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.objectives.surrogates.policy_losses import SurrogateOutput
from genrl.objectives.tokens.token_aggregation import aggregate
from genrl.objectives.tokens.token_regularisers import sampled_entropy
from genrl.objectives.tokens.tokens import masked, token_mean
from genrl.runtime.loop.recorded import Recorded
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.surrogates import GroupLoss
from genrl.vlm.rollout.recorded import token_batch
from genrl.vlm.rollout.token_batch import TokenBatch


class PolicyLoss(NamedTuple):
    """loss []: this micro-batch's part of the step's loss. metrics: numbers [] without gradient.

    `loss/<name>` are the parts that add up to the loss; `ratio_mean`, `ratio_max`, `clipped` (share), `entropy` (mean
    -l) and `kl_<estimator>` are of the valid tokens of the micro-batch.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def recipe_loss(preset: Preset, log_prob: Tensor, extra: Mapping[str, Tensor], given: Recorded) -> dict[str, Tensor]:
    """The loss of rows, [], from their log-probabilities [b, T] under the weights as they are, and what it measures."""
    made = policy_loss(preset, token_batch(given.tensors).with_log_prob(log_prob, extra))
    return {"loss": made.loss, "log_prob": log_prob, **made.metrics}


def policy_loss(preset: Preset, batch: TokenBatch) -> PolicyLoss:
    """`aggregate(-weight * surrogate + KL) + regularisers` of a micro-batch that `estimate` has seen.

    Gradient through `batch.log_prob` (and [value]) only. Raises ValueError for a batch that was not estimated, one that
    lacks a tensor which the preset reads, and a split group under a group loss.
    """
    log_prob = batch.read("log_prob", "the loss")
    if batch.advantage is None or batch.rows is None:
        raise ValueError("a batch has no advantages before estimate(preset, batch) of the whole rollout batch")
    batch = batch.weighted(product(batch.weight, *(choice.factor_now(batch) for choice in preset.weights)))
    metrics: dict[str, Tensor] = {"entropy": sampled_entropy(log_prob.detach(), batch.mask)}

    def aggregated(terms: Tensor) -> Tensor:
        totals = {"rows": batch.rows, "tokens": batch.tokens, "length": preset.length}
        return aggregate(terms, batch.mask, preset.aggregation, **totals)

    parts: dict[str, Tensor] = {}
    if preset.surrogate is not None:
        term = preset.surrogate.loss(batch)
        parts["policy"] = aggregated(term.loss if batch.weight is None else batch.weight * term.loss)
        metrics |= _ratio_metrics(term, batch.mask)
    elif preset.group_loss is not None:
        parts["policy"] = _group_loss(preset.group_loss, batch)
    for choice in preset.regularisers:
        value, measured = choice.value(batch, aggregated)
        parts[choice.name] = parts[choice.name] + value if choice.name in parts else value
        metrics |= measured
    metrics |= {f"loss/{name}": value.detach() for name, value in parts.items()}
    return PolicyLoss(torch.stack(list(parts.values())).sum(), metrics)


def product(*factors: Tensor | None) -> Tensor | None:
    """That of the factors that are there, in order; None without any."""
    whole: Tensor | None = None
    for factor in factors:
        if factor is not None:
            whole = factor if whole is None else whole * factor
    return whole


def _group_loss(choice: GroupLoss, batch: TokenBatch) -> Tensor:
    present = (batch.group[:, None] == batch.group[None, :]).sum(dim=1)
    if batch.group_size is None or batch.groups is None:
        raise ValueError("a group loss needs the sizes of whole groups: estimate(preset, batch) first")
    split = present != batch.group_size
    if bool(split.any()):
        numbers = sorted(set(batch.group[split].tolist()))
        raise ValueError(
            f"{choice.name!r} is a loss of whole groups, and this micro-batch has parts of groups {numbers}: make it "
            "with micro_batches(preset, batch, size)"
        )
    scored = ~batch.scores("the group loss").isnan()
    if not bool(scored.any()):  # a loss of nothing still has a backward pass, which all processes make
        return 0.0 * masked(batch.terms[0], batch.mask).sum()
    return choice.loss(batch, scored)


def _ratio_metrics(term: SurrogateOutput, mask: Tensor) -> dict[str, Tensor]:
    valid = mask.bool() if term.ratio.shape == mask.shape else mask.bool().any(dim=1, keepdim=True)
    ratio = term.ratio.detach()
    return {
        "ratio_mean": token_mean(ratio, valid),
        "ratio_max": masked(ratio, valid).max(),
        "clipped": token_mean(term.clipped.to(ratio.dtype).expand(valid.shape), valid),
    }
