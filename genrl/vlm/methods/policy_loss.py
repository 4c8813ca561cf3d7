"""From a preset and the tensors of a rollout to a loss: `estimate` per rollout batch, `policy_loss` per micro-batch.

    rollout = estimate(preset, TokenBatch(mask=..., group=..., rewards=..., old_log_prob=...)).batch
    for part in micro_batches(rollout, size):                  # no gradient up to here
        policy_loss(preset, part.with_log_prob(model(...))).loss.backward()

All statistics (group and batch means, whitening, quantiles, min-max) are made by `estimate`, over all rows of all
processes. The sum of the micro-batches' losses is the loss of the step. Shapes and masks as in `objectives.tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.objectives.groups import group_statistics
from genrl.objectives.policy_losses import SurrogateOutput, kl_k3
from genrl.objectives.token_advantages import Visits
from genrl.objectives.token_regularisers import sampled_entropy
from genrl.objectives.token_surrogates import unsampled_loss
from genrl.objectives.tokens import aggregate, log_ratio, masked, per_token, token_mean
from genrl.runtime.loop.recorded import Recorded
from genrl.vlm.config.sections import Rescue
from genrl.vlm.methods.updates import token_batch
from genrl.vlm.recipe.advantages import WhitenedReturns
from genrl.vlm.recipe.losses import GroupLoss
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.shaping import KlInReward
from genrl.vlm.recipe.weights import EngineMismatch
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
    computed = policy_loss(preset, token_batch(given.tensors).with_log_prob(log_prob, extra))
    return {"loss": computed.loss, "log_prob": log_prob, **computed.metrics}


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
    if batch.old_log_prob is None and batch.sampler_log_prob is not None:  # else `estimate` measures it
        gap = gaps(log_prob.detach(), batch.sampler_log_prob, batch.mask)
        metrics |= {f"sampler/gap_{name}": gap[name] for name in ("mean", "k3")}

    def aggregated(terms: Tensor) -> Tensor:
        totals = {"rows": batch.rows, "tokens": batch.tokens, "length": preset.length}
        return aggregate(terms, batch.mask, preset.aggregation, **totals)

    parts: dict[str, Tensor] = {}
    if preset.surrogate is not None:
        term = preset.surrogate.loss(batch)
        of_tokens = term.loss if batch.weight is None else batch.weight * term.loss
        if "unsampled" in batch.extra:
            others = unsampled_loss(
                log_prob, per_token(batch.read("advantage", "the loss"), batch.mask), shaping=Rescue.shaping
            )
            of_tokens = torch.where(batch.extra["unsampled"][:, None], masked(others, batch.mask), of_tokens)
        parts["policy"] = aggregated(of_tokens)
        # of a group loss there is no ratio to tell of
        metrics |= _ratio_metrics(term, batch.mask)
    elif preset.group_loss is not None:
        parts["policy"] = _group_loss(preset.group_loss, batch)
    for choice in preset.regularisers:
        value, measured = choice.value(batch, aggregated)
        # A recipe may have one regulariser twice, with other constants (a band for each kind of task).
        parts[choice.name] = parts[choice.name] + value if choice.name in parts else value
        metrics |= measured
    metrics |= {f"loss/{name}": value.detach() for name, value in parts.items()}
    return PolicyLoss(torch.stack(list(parts.values())).sum(), metrics)


def product(*factors: Tensor | None) -> Tensor | None:
    """Product of the factors that are there, in order; None without any."""
    total: Tensor | None = None
    for factor in factors:
        if factor is not None:
            total = factor if total is None else total * factor
    return total


def _group_loss(choice: GroupLoss, batch: TokenBatch) -> Tensor:
    present = (batch.group[:, None] == batch.group[None, :]).sum(dim=1)
    if batch.group_size is None or batch.groups is None:
        raise ValueError("a group loss needs the sizes of whole groups: estimate(preset, batch) first")
    split = present != batch.group_size
    if bool(split.any()):
        numbers = sorted(set(batch.group[split].tolist()))
        raise ValueError(
            f"{choice.name!r} is a loss of whole groups, and this micro-batch has parts of groups {numbers}: make it "
            "with micro_batches(batch, size, whole_groups=True)"
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


class Estimate(NamedTuple):
    """batch: ready for `policy_loss`; visits: DCPO's state afterwards (else as it was); metrics to log."""

    batch: TokenBatch
    visits: Visits
    metrics: dict[str, float]


def estimate(
    preset: Preset,
    batch: TokenBatch,
    *,
    prompts: Sequence[str] | None = None,
    visits: Mapping[str, tuple[int, float, float]] | None = None,
) -> Estimate:
    """Advantages and token weights of a **whole rollout batch**, all processes' rows together.

    prompts (one per group, in the order of sorted group numbers) and visits are for DCPO's smoothed advantage.
    Raises ValueError where the preset reads a tensor that is not there, naming the choice and the tensor.
    """
    with torch.no_grad():
        shaped = replace(_shaped(preset, batch), prompts=prompts, visits=dict(visits or {}))
        advantage = preset.advantage.estimate(shaped)
        missing = torch.zeros_like(batch.group, dtype=torch.bool) if batch.rewards is None else batch.rewards.isnan()
        of_rows = missing if advantage.dim() == 1 else missing[:, None]
        # a reward that failed must move no mean or spread of the others
        advantage = torch.where(of_rows, torch.nan, advantage)  # no part of a transform's statistics
        for transform in preset.transforms:
            advantage = transform.changed(advantage, shaped)  # whose rewards have the terms
        advantage = torch.where(of_rows, 0.0, advantage)
        _, index, sizes = torch.unique(batch.group, return_inverse=True, return_counts=True)
        rows, tokens = len(batch.mask), int(batch.mask.bool().sum())
        ready = replace(
            batch, advantage=advantage, group_size=sizes[index], rows=rows, tokens=tokens, groups=len(sizes)
        )
        # After the advantages: some weights (Clip-Cov) are of both.
        weight = product(*(choice.factor(ready) for choice in preset.weights))
        ready = replace(ready, weight=weight)
        # what a loss reads of the whole batch is made before it is cut into micro-batches
        for choice in preset.choices:
            ready = replace(ready, extra={**ready.extra, **choice.prepared(ready)})
    metrics = {"advantage_abs_mean": float(advantage.abs().mean()), "tokens_mean": tokens / max(rows, 1)}
    if batch.rewards is not None:
        statistics = group_statistics(batch.rewards, batch.group)
        metrics |= {"zero_std_ratio": statistics.zero_std_ratio, "group_std_mean": statistics.mean_std}
    if weight is not None:
        metrics["token_weight_mean"] = float(token_mean(weight.expand(batch.mask.shape), batch.mask))
    metrics |= _sampler_metrics(preset, batch)
    return Estimate(ready, shaped.visits, metrics)


def _shaped(preset: Preset, batch: TokenBatch) -> TokenBatch:
    """The batch with the preset's terms added to its rewards."""
    for term in preset.reward_terms:
        rewards = batch.scores(f"reward term {term.name!r}")
        if isinstance(term, KlInReward) and isinstance(preset.advantage, WhitenedReturns):
            # returns discount over tokens, so each token pays for its own part of the KL
            paid = batch.extra.get("kl_reward", 0.0) + term.token_reward(batch)
            batch = replace(batch, extra={**batch.extra, "kl_reward": paid})
        else:
            batch = replace(batch, rewards=rewards + term.reward(batch))
    return batch


def gaps(trainer: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far two log-probabilities [B, T] of the same tokens are apart, []."""
    gap, k3 = log_ratio(trainer, sampler, mask).abs(), kl_k3(sampler, trainer)
    return {"mean": token_mean(gap, mask), "max": gap.max(), "k3": token_mean(masked(k3, mask), mask)}


def _sampler_metrics(preset: Preset, batch: TokenBatch) -> dict[str, float]:
    """How far sampler and trainer are apart, and what `engine_mismatch` makes of it; empty without both."""
    if batch.sampler_log_prob is None or batch.old_log_prob is None:
        return {}
    gap = gaps(batch.old_log_prob, batch.sampler_log_prob, batch.mask)
    metrics = {f"sampler_gap_{name}": float(value) for name, value in gap.items()}
    for choice in preset.weights:
        if isinstance(choice, EngineMismatch):
            weight = choice.factor(batch)
            changed = weight != choice.model_copy(update={"low": 0.0, "high": math.inf}).factor(batch)
            metrics["sampler_corrected"] = float(token_mean(changed.expand(batch.mask.shape).double(), batch.mask))
            weights = weight.double().expand(batch.mask.shape)
            metrics |= {
                "importance_mean": float(token_mean(weights, batch.mask)),
                "importance_left_out": float(token_mean((weights == 0).double(), batch.mask)),
                "importance_max_abs_dev": float(masked((weights - 1.0).abs(), batch.mask).max()),
            }
    return metrics


def sampler_figures(metrics: Mapping[str, float], *, differs: bool) -> dict[str, float]:
    """Metrics of `estimate` that compare sampler and trainer, as they are logged. differs: what sampled is not
    the model as it is trained, so answers are weighted."""
    kinds = ("sampler_", "importance_") if differs else ("sampler_",)
    return {name.replace("_", "/", 1): value for name, value in metrics.items() if name.startswith(kinds)}
