"""From a preset and the tensors of a rollout to a loss: `estimate` per rollout batch, `policy_loss` per micro-batch.

    rollout = estimate(preset, TokenBatch(mask=..., group=..., rewards=..., old_log_prob=...)).batch
    for part in micro_batches(preset, rollout, size):          # no gradient up to here
        policy_loss(preset, part.with_log_prob(model(...))).loss.backward()

All statistics (group and batch means, whitening, quantiles, min-max) are made by `estimate`, over all rows of all
processes. The sum of the micro-batches' losses is the loss of the step. Shapes and masks as in `objectives.tokens`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from genrl.objectives.advantages.groups import best_and_worst
from genrl.objectives.preferences.preference import dpo_loss
from genrl.objectives.surrogates.policy_losses import SurrogateOutput, kl_k2, kl_k3
from genrl.objectives.tokens import group_losses, token_surrogates, token_weights
from genrl.objectives.tokens.masked_diffusion import linear_bound_loss
from genrl.objectives.tokens.token_aggregation import aggregate
from genrl.objectives.tokens.token_regularisers import (
    clipped_value_loss,
    entropy_band,
    kl_k3_clamped,
    perception_loss,
    sampled_entropy,
)
from genrl.objectives.tokens.tokens import (
    log_ratio,
    masked,
    mean_log_ratio,
    row_mean,
    row_sum,
    sequence_log_ratio,
    token_mean,
)
from genrl.vlm.methods.estimate import band_tokens
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.regularisers import (
    EntropyBand,
    EntropyBonus,
    EntropyPenalty,
    Kl,
    Perception,
    Regulariser,
    ValueLoss,
)
from genrl.vlm.recipe.surrogates import (
    Cispo,
    Classification,
    Clip,
    DistributionMatching,
    DynamicClip,
    ElasticClip,
    GeometricMean,
    GroupLoss,
    KlCov,
    LinearBound,
    LogClamp,
    Preference,
    Regression,
    Reinforce,
    Sapo,
    SequenceClip,
    SequenceTokenClip,
    Vespo,
)
from genrl.vlm.recipe.weights import OffPolicyMask
from genrl.vlm.rollout.token_batch import TokenBatch, given


class PolicyLoss(NamedTuple):
    """loss []: this micro-batch's part of the step's loss. metrics: numbers [] without gradient.

    `loss/<name>` are the parts that add up to the loss; `ratio_mean`, `ratio_max`, `clipped` (share), `entropy` (mean
    -l) and `kl_<estimator>` are of the valid tokens of the micro-batch.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(preset: Preset, batch: TokenBatch) -> PolicyLoss:
    """`aggregate(-weight * surrogate + KL) + regularisers` of a micro-batch that `estimate` has seen.

    Gradient through `batch.log_prob` (and [value]) only. Raises ValueError for a batch that was not estimated, one that
    lacks a tensor which the preset reads, and a split group under a group loss.
    """
    log_prob = given(batch, "log_prob", "the loss")
    if batch.advantage is None or batch.rows is None:
        raise ValueError("a batch has no advantages before estimate(preset, batch) of the whole rollout batch")
    old = log_prob.detach() if batch.old_log_prob is None else batch.old_log_prob
    metrics: dict[str, Tensor] = {"entropy": sampled_entropy(log_prob.detach(), batch.mask)}
    weight = _loss_weight(preset, batch, log_prob)
    parts: dict[str, Tensor] = {}
    if preset.group_loss is not None:
        parts["policy"] = _group_loss(preset.group_loss, batch, log_prob, old)
    else:
        term = _surrogate(preset, batch, log_prob, old)
        parts["policy"] = _aggregated(preset, batch, term.loss if weight is None else weight * term.loss)
        metrics |= _ratio_metrics(term, batch.mask)
    for choice in preset.regularisers:
        name, value = _regulariser(choice, preset, batch, log_prob, weight, metrics)
        parts[name] = parts[name] + value if name in parts else value
    metrics |= {f"loss/{name}": value.detach() for name, value in parts.items()}
    return PolicyLoss(torch.stack(list(parts.values())).sum(), metrics)


def _loss_weight(preset: Preset, batch: TokenBatch, log_prob: Tensor) -> Tensor | None:
    """The estimated weight times those that depend on the current policy."""
    weight = batch.weight
    for choice in preset.weights:
        if isinstance(choice, OffPolicyMask):
            sampler = given(batch, "sampler_log_prob", "the off-policy mask")
            advantage = given(batch, "advantage", "the off-policy mask")
            keep = token_weights.off_policy_mask(log_prob, sampler, advantage, batch.mask, threshold=choice.threshold)
            weight = keep if weight is None else weight * keep
    return None if weight is None else weight.detach().to(log_prob.dtype)


def _surrogate(preset: Preset, batch: TokenBatch, log_prob: Tensor, old: Tensor) -> SurrogateOutput:
    advantage = given(batch, "advantage", "the surrogate")
    arguments = (log_prob, old, advantage, batch.mask)
    match preset.surrogate:
        case Clip(low=low, high=high, cap=cap, dual=dual, drop_above=drop_above):
            return token_surrogates.clip_surrogate(
                *arguments, low=low, high=high, cap=cap, dual=dual, drop_above=drop_above
            )
        case ElasticClip(low=low, high=high):
            width = given(batch, "clip_width", "ETR").to(log_prob.dtype)[:, None]
            return token_surrogates.clip_surrogate(*arguments, low=low * width, high=high * width)
        case SequenceClip(low=low, high=high):
            return token_surrogates.sequence_clip_surrogate(*arguments, low=low, high=high)
        case SequenceTokenClip(low=low, high=high):
            return token_surrogates.sequence_token_clip_surrogate(*arguments, low=low, high=high)
        case DynamicClip(low=low, high=high):
            return token_surrogates.dynamic_clip_surrogate(*arguments, low=low, high=high)
        case LogClamp(low=low, high=high):
            return token_surrogates.log_clamp_surrogate(*arguments, low=low, high=high)
        case GeometricMean(low=low, high=high):
            return token_surrogates.geometric_mean_surrogate(*arguments, low=low, high=high)
        case KlCov(beta=beta):
            return token_surrogates.kl_cov_surrogate(*arguments, given(batch, "kl_cov", "KL-Cov"), beta=beta)
        case Cispo(highest=highest):
            return token_surrogates.cispo_surrogate(*arguments, highest=highest)
        case Sapo():
            return token_surrogates.sapo_surrogate(*arguments)
        case Reinforce():
            return token_surrogates.reinforce_surrogate(*arguments)
        case Vespo():
            return token_surrogates.vespo_surrogate(*arguments)
        case LinearBound():
            if not bool(batch.mask.bool().all()):
                raise ValueError("the columns of log_prob are ELBO samples here: the mask must be 1 everywhere")
            loss = linear_bound_loss(log_prob, old, advantage)[:, None]
            ratio = mean_log_ratio(log_prob.detach(), old, batch.mask)[:, None].exp()
            return SurrogateOutput(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))
        case None:
            raise AssertionError("Preset has either a surrogate or a group loss")


def _aggregated(preset: Preset, batch: TokenBatch, term: Tensor) -> Tensor:
    signs = batch.advantage if preset.aggregation == "balanced" else None
    return aggregate(
        term,
        batch.mask,
        preset.aggregation,
        rows=batch.rows,
        tokens=batch.tokens,
        length=preset.length,
        advantage=signs,
    )


def _group_loss(choice: GroupLoss, batch: TokenBatch, log_prob: Tensor, old: Tensor) -> Tensor:
    present = (batch.group[:, None] == batch.group[None, :]).sum(dim=1)
    if batch.group_size is None or batch.rows is None or batch.groups is None:
        raise ValueError("a group loss needs the sizes of whole groups: estimate(preset, batch) first")
    split = present != batch.group_size
    if bool(split.any()):
        numbers = sorted(set(batch.group[split].tolist()))
        raise ValueError(
            f"{choice.name!r} is a loss of whole groups, and this micro-batch has parts of groups {numbers}: make it "
            "with micro_batches(preset, batch, size)"
        )
    advantage = given(batch, "advantage", "the group loss")
    # of advantage 0, a row without a score would be taught as one that is no better than its group
    kept = ~given(batch, "rewards", "the group loss").isnan()
    if not bool(kept.any()):
        return 0.0 * masked(log_prob, batch.mask).sum()
    group = batch.group[kept]
    match choice:
        case Regression():
            score = sequence_log_ratio(log_prob, old, batch.mask)
            return group_losses.regression_loss(score[kept], advantage[kept], group).sum() / batch.rows
        case Classification():
            score = mean_log_ratio(log_prob, old, batch.mask)
            return group_losses.classification_loss(score[kept], advantage[kept] > 0, group).sum() / batch.groups
        case DistributionMatching():
            score = row_mean(masked(log_prob, batch.mask), batch.mask)
            rewards = given(batch, "rewards", "distribution matching")
            return group_losses.distribution_matching_loss(score, rewards, batch.group).sum() / batch.groups
        case Preference(beta=beta):
            sign = best_and_worst(given(batch, "rewards", "the preference"), batch.group)
            best, worst = (
                (sign == side).nonzero()[:, 0] for side in (1, -1)
            )  # by group, since rows of one are together
            own = row_sum(log_prob, batch.mask)
            ref = row_sum(given(batch, "ref_log_prob", "the preference"), batch.mask)
            return dpo_loss(own[best], own[worst], ref[best], ref[worst], beta=beta).loss.sum() / batch.groups


def _regulariser(
    choice: Regulariser,
    preset: Preset,
    batch: TokenBatch,
    log_prob: Tensor,
    weight: Tensor | None,
    metrics: dict[str, Tensor],
) -> tuple[str, Tensor]:
    """(name, value) of one regulariser; its own measurements go to `metrics`."""
    mask, rows = batch.mask, batch.rows or len(batch.mask)
    match choice:
        case Kl(beta=beta, estimator=estimator, weighted=weighted, corrected=corrected):
            new = masked(log_prob, mask)
            reference = masked(given(batch, "ref_log_prob", "the KL"), mask)
            estimates = {"k2": kl_k2, "k3": kl_k3, "k3_clamped": kl_k3_clamped}
            kl = estimates[estimator](new, reference)
            metrics[f"kl_{estimator}"] = token_mean(kl.detach(), mask)
            if corrected:
                old = log_prob.detach() if batch.old_log_prob is None else batch.old_log_prob
                kl = kl * log_ratio(log_prob, old, mask).exp()
            return "kl", beta * _aggregated(preset, batch, kl * weight if weighted and weight is not None else kl)
        case EntropyPenalty(coefficient=coefficient):
            total = aggregate(-masked(log_prob, mask), mask, "token_mean_global", tokens=batch.tokens)
            return "entropy_penalty", coefficient * total
        case EntropyBonus(coefficient=coefficient):
            entropy = masked(given(batch, "policy_entropy", "the bonus for entropy"), mask)
            metrics["policy_entropy"] = token_mean(entropy.detach(), mask)
            return "entropy_bonus", -coefficient * aggregate(entropy, mask, "token_mean_global", tokens=batch.tokens)
        case EntropyBand(coefficient=coefficient, low=low, high=high):
            if batch.entropy_bounds is not None:
                low, high = batch.entropy_bounds.tolist()
            kept = band_tokens(choice, mask, weight)
            tasks = batch.extra.get("task", torch.zeros_like(batch.group))
            costs = []
            for number in sorted(set(tasks.tolist())):
                entropy = sampled_entropy(log_prob, kept & (tasks == number)[:, None])
                costs.append((tasks == number).sum() / rows * entropy_band(entropy, low, high))
            return "entropy_band", coefficient * torch.stack(costs).sum()
        case Perception(gamma=gamma, eta=eta):
            degraded = given(batch, "degraded", "the perception loss")
            twins = mask.bool() & ~(degraded.isnan() & mask.bool()).any(dim=1, keepdim=True)
            return "perception", perception_loss(log_prob, degraded, twins, gamma=gamma, eta=eta, rows=rows)
        case ValueLoss(coefficient=coefficient, clip=clip):
            value, old_value, returns = (given(batch, n, "the value loss") for n in ("value", "old_value", "returns"))
            if value.dim() == 1:
                squares = clipped_value_loss(value, old_value, returns.to(value.dtype), clip=clip)
                return "value", coefficient * squares.sum() / rows
            arguments = (masked(tensor.to(value.dtype), mask) for tensor in (value, old_value, returns))
            squares = clipped_value_loss(*arguments, clip=clip)
            return "value", coefficient * aggregate(squares, mask, "token_mean_global", tokens=batch.tokens)


def _ratio_metrics(term: SurrogateOutput, mask: Tensor) -> dict[str, Tensor]:
    valid = mask.bool() if term.ratio.shape == mask.shape else mask.bool().any(dim=1, keepdim=True)
    ratio = term.ratio.detach()
    return {
        "ratio_mean": token_mean(ratio, valid),
        "ratio_max": masked(ratio, valid).max(),
        "clipped": token_mean(term.clipped.to(ratio.dtype).expand(valid.shape), valid),
    }
