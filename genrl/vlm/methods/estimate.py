"""From a preset and a whole rollout batch to advantages and token weights. No gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.objectives.advantages import reward_shaping
from genrl.objectives.advantages.groups import group_advantages, group_statistics
from genrl.objectives.surrogates.policy_losses import kl_k3
from genrl.objectives.tokens import (
    semi_online,
    token_advantages,
    token_covariance,
    token_surrogates,
    token_weights,
    turn_credit,
)
from genrl.objectives.tokens.token_advantages import Visits
from genrl.objectives.tokens.tokens import log_ratio, masked, sequence_log_ratio, token_count, token_mean
from genrl.vlm.recipe.advantages import (
    BatchNormalise,
    ClampAdvantage,
    ConsistencyBonus,
    CriticAdvantage,
    GreedyBaseline,
    GroupAdvantage,
    Hierarchical,
    InformativeGroups,
    KlInReward,
    LeaveOneOut,
    LengthReward,
    LengthWeighted,
    NormaliseThenSum,
    OverlongPenalty,
    PositiveOnly,
    RankQuantiles,
    SemiOnline,
    SigmaFilter,
    SmoothedAdvantage,
    TrajectoryDependency,
    Transform,
    TurnLeaveOneOut,
    Uncertainty,
    VirtualReward,
    WhitenedReturns,
)
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.regularisers import EntropyBand
from genrl.vlm.recipe.surrogates import ElasticClip, KlCov
from genrl.vlm.recipe.weights import (
    ClipCov,
    Divergence,
    EngineMismatch,
    OffPolicyMask,
    StepMeans,
    TopDependency,
    TopEntropy,
)
from genrl.vlm.rollout.token_batch import TokenBatch, given


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
        rewards = _shaped_rewards(preset, batch)
        advantage, after = _advantage(preset, batch, rewards, prompts, dict(visits or {}))
        missing = torch.zeros_like(batch.group, dtype=torch.bool) if rewards is None else rewards.isnan()
        of_rows = missing if advantage.dim() == 1 else missing[:, None]
        advantage = torch.where(of_rows, torch.nan, advantage)  # no part of a transform's statistics
        for transform in preset.transforms:
            advantage = _transformed(transform, advantage, batch)
        advantage = torch.where(of_rows, 0.0, advantage)
        scored = batch.mask.bool() & ~missing[:, None]
        weight = _weight(preset, batch, advantage, scored)
        _, index, sizes = torch.unique(batch.group, return_inverse=True, return_counts=True)
        width = None
        if isinstance(preset.surrogate, ElasticClip):
            rewards = given(batch, "rewards", "ETR")
            width = token_surrogates.elastic_width(advantage, rewards, batch.group, alpha=0.5, gamma=0.5)  # inferred
        extra = dict(batch.extra)
        if isinstance(preset.surrogate, KlCov):
            share, found = preset.surrogate.share, _covariance(batch, advantage, scored)
            extra["kl_cov"] = token_covariance.kl_cov_tokens(found, scored, share=share)
        rows, tokens = len(batch.mask), int(batch.mask.bool().sum())
        ready = replace(
            batch,
            extra=extra,
            advantage=advantage,
            weight=weight,
            clip_width=width,
            group_size=sizes[index],
            rows=rows,
            tokens=tokens,
            groups=len(sizes),
        )
        ready = replace(ready, entropy_bounds=_entropy_bounds(preset, ready))
    metrics = {"advantage_abs_mean": float(advantage.abs().mean()), "tokens_mean": tokens / max(rows, 1)}
    if batch.rewards is not None:
        statistics = group_statistics(batch.rewards, batch.group)
        metrics |= {"zero_std_ratio": statistics.zero_std_ratio, "group_std_mean": statistics.mean_std}
    if weight is not None:
        metrics["token_weight_mean"] = float(token_mean(weight.expand(batch.mask.shape), batch.mask))
    metrics |= _sampler_metrics(preset, batch)
    return Estimate(ready, after, metrics)


def _sampler_metrics(preset: Preset, batch: TokenBatch) -> dict[str, float]:
    """How far sampler and trainer are apart, and what `engine_mismatch` makes of it; empty without both."""
    if batch.sampler_log_prob is None or batch.old_log_prob is None:
        return {}
    gap = log_ratio(batch.old_log_prob, batch.sampler_log_prob, batch.mask).abs()
    metrics = {"sampler_gap_mean": float(token_mean(gap, batch.mask)), "sampler_gap_max": float(gap.max())}
    k3 = kl_k3(batch.sampler_log_prob, batch.old_log_prob)
    metrics["sampler_gap_k3"] = float(token_mean(masked(k3, batch.mask), batch.mask))
    for choice in preset.weights:
        if isinstance(choice, EngineMismatch):
            weight = _mismatch(choice, batch)
            changed = weight != _mismatch(choice.model_copy(update={"low": 0.0, "high": math.inf}), batch)
            metrics["sampler_corrected"] = float(token_mean(changed.expand(batch.mask.shape).double(), batch.mask))
            weights = weight.double().expand(batch.mask.shape)
            metrics |= {
                "importance_mean": float(token_mean(weights, batch.mask)),
                "importance_left_out": float(token_mean((weights == 0).double(), batch.mask)),
                "importance_max_abs_dev": float(masked((weights - 1.0).abs(), batch.mask).max()),
            }
    return metrics


def sampler_figures(metrics: Mapping[str, float], *, differs: bool) -> dict[str, float]:
    """Those of `estimate`'s metrics that compare sampler and trainer, as they are logged. differs: what sampled is not
    the model as it is trained, so answers are weighted."""
    kinds = ("sampler_", "importance_") if differs else ("sampler_",)
    return {name.replace("_", "/", 1): value for name, value in metrics.items() if name.startswith(kinds)}


def _shaped_rewards(preset: Preset, batch: TokenBatch) -> Tensor | None:
    """Row rewards with the terms of the preset; KL goes to tokens where the estimator takes token rewards."""
    rewards = batch.rewards
    by_token = isinstance(preset.advantage, WhitenedReturns)
    for term in preset.reward_terms:
        if rewards is None:
            raise ValueError(f"reward term {term.name!r} is added to rewards [B], which this batch does not have")
        match term:
            case LengthReward(thresholds=thresholds, coefficient=coefficient):
                rewards = rewards + coefficient * reward_shaping.length_reward(token_count(batch.mask), thresholds)
            case OverlongPenalty(maximum=maximum, buffer=buffer):
                lengths = token_count(batch.mask)
                rewards = rewards + reward_shaping.overlong_penalty(lengths, maximum=maximum, buffer=buffer)
            case ConsistencyBonus():
                confidence = reward_shaping.answer_confidence(
                    given(batch, "ema", "the consistency bonus"),
                    given(batch, "answer_mask", "the consistency bonus"),
                )
                rewards = rewards + reward_shaping.consistency_bonus(
                    given(batch, "accuracy", "the consistency bonus"),
                    confidence,
                    batch.group,
                    coefficient=term.coefficient,
                    margin=term.margin,
                )
            case KlInReward(beta=beta) if not by_token:
                old = given(batch, "old_log_prob", "the KL in the reward")
                reference = given(batch, "ref_log_prob", "the KL in the reward")
                rewards = rewards - beta * sequence_log_ratio(old, reference, batch.mask)
            case _:
                pass
    return rewards


def _advantage(
    preset: Preset,
    batch: TokenBatch,
    rewards: Tensor | None,
    prompts: Sequence[str] | None,
    visits: Visits,
) -> tuple[Tensor, Visits]:
    choice, group = preset.advantage, batch.group
    if isinstance(choice, CriticAdvantage):
        return given(batch, "credit", f"the {choice.level}-level critic").double(), visits
    if isinstance(choice, NormaliseThenSum):
        components = given(batch, "components", "normalise_then_sum")
        weights = preset.reward_weights or (1.0,) * components.shape[1]
        return token_advantages.normalise_then_sum(components, weights, group), visits
    if isinstance(choice, Hierarchical):
        high, low, step = (given(batch, name, "the two steps of an answer") for name in ("high", "low", "step"))
        own = token_advantages.hierarchical_advantages(high, low, group, share=choice.share)
        return torch.where(step == 0, own.high[:, None], own.low[:, None]), visits
    if isinstance(choice, SemiOnline | TurnLeaveOneOut):
        return _of_turns(choice, batch), visits
    if isinstance(choice, WhitenedReturns):
        return _whitened_returns(choice, preset, batch, rewards), visits
    if rewards is None:
        raise ValueError(f"advantage {choice.name!r} reads rewards [B], which this batch does not have")
    match choice:
        case GroupAdvantage(scale=scale, eps=eps):
            return group_advantages(rewards, group, scale=scale, eps=eps, ddof=1), visits
        case LeaveOneOut():
            return token_advantages.leave_one_out(rewards, group), visits
        case GreedyBaseline():
            return token_advantages.greedy_baseline(rewards, given(batch, "greedy", "ReMax")), visits
        case LengthWeighted():
            return token_advantages.length_weighted(rewards, token_count(batch.mask), group), visits
        case VirtualReward(best=best):
            return token_advantages.with_virtual_reward(rewards, group, best=best), visits
        case RankQuantiles(scope=scope):
            ranked = group if scope == "group" else given(batch, "task", "ranks within a task")
            return token_advantages.rank_quantiles(rewards, ranked), visits
        case SmoothedAdvantage():
            if prompts is None:
                raise ValueError("the smoothed advantage keeps statistics by prompt: give estimate(..., prompts=...)")
            output = token_advantages.smoothed_advantages(rewards, group, prompts, visits)
            return output.advantage, output.visits


def _of_turns(choice: SemiOnline | TurnLeaveOneOut, batch: TokenBatch) -> Tensor:
    """[B, T]: of each token that of its turn."""
    turn, paid = (given(batch, name, "the credit of turns") for name in ("turn", "turn_reward"))
    row, place = batch.mask.bool().nonzero(as_tuple=True)
    turn, size = turn.long(), (len(turn), int(turn.max()) + 1)
    at = (row, turn[row, place])
    rewards = torch.full(size, torch.nan, dtype=torch.float64).index_put(at, paid[row, place].double())
    if isinstance(choice, TurnLeaveOneOut):
        found = turn_credit.turn_leave_one_out(rewards, batch.group, gamma=choice.gamma)
    else:
        matched = given(batch, "matched", "the credit of turns")[row, place].bool()
        own = torch.zeros(size, dtype=torch.bool).index_put(at, matched)
        weights = {"gamma": choice.gamma, "episode": choice.episode, "step": choice.step}
        found = semi_online.semi_online_advantages(rewards, own, batch.group, **weights)
    return masked(found.gather(1, turn), batch.mask)


def _whitened_returns(choice: WhitenedReturns, preset: Preset, batch: TokenBatch, rewards: Tensor | None) -> Tensor:
    mask = batch.mask
    if "token_rewards" in batch.extra:
        if choice.baseline:
            raise ValueError("a group baseline is subtracted from rewards [B]; this batch has extra['token_rewards']")
        per_step = masked(batch.extra["token_rewards"].double(), mask)
    else:
        if rewards is None:
            raise ValueError("whitened_returns reads rewards [B] or extra['token_rewards']; this batch has neither")
        # a row without a score takes no part
        mask = mask.bool() & ~rewards.isnan()[:, None]
        scores = group_advantages(rewards, batch.group, scale="none") if choice.baseline else rewards.double()
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        per_step = masked(scores.nan_to_num(nan=0.0)[:, None].expand(mask.shape), last)
    for term in preset.reward_terms:
        if isinstance(term, KlInReward):
            old = given(batch, "old_log_prob", "the KL in the reward")
            reference = given(batch, "ref_log_prob", "the KL in the reward")
            per_step = reward_shaping.with_kl(per_step, old, reference, mask, beta=term.beta)
    returns = token_advantages.token_returns(per_step, mask, gamma=choice.gamma)
    return token_advantages.whitened(returns, mask, eps=choice.eps)


def _transformed(transform: Transform, advantage: Tensor, batch: TokenBatch) -> Tensor:
    mask = batch.mask
    match transform:
        case BatchNormalise():
            return token_advantages.batch_normalised(advantage, mask if advantage.dim() == 2 else None)
        case SigmaFilter(limit=limit):
            return token_advantages.sigma_filtered(advantage, limit=limit)
        case Uncertainty():
            scores = given(batch, "scores", "the uncertainty of the scores")
            uncertainty = token_advantages.score_uncertainty(scores, batch.group)
            return token_advantages.scaled(advantage, torch.exp(-0.2 * uncertainty), mask)
        case TrajectoryDependency():
            factor = token_advantages.trajectory_weight(_dependency(batch), mask)
            return token_advantages.scaled(advantage, factor, mask)
        case ClampAdvantage(limit=limit):
            return advantage.clamp(-limit, limit)
        case PositiveOnly():
            return advantage.clamp(min=0.0)
        case InformativeGroups():
            rows = advantage if advantage.dim() == 1 else masked(advantage, mask).abs().sum(1)
            return advantage * token_advantages.informative_factor(rows, batch.group)


def _dependency(batch: TokenBatch) -> Tensor:
    old = given(batch, "old_log_prob", "the visual dependency")
    other = given(batch, "masked_image", "the visual dependency")
    return token_weights.visual_dependency(old, other, batch.mask)


def _covariance(batch: TokenBatch, advantage: Tensor, scored: Tensor) -> Tensor:
    old = given(batch, "old_log_prob", "the covariance of tokens")
    return token_covariance.token_covariance(old, advantage, scored)


def _weight(preset: Preset, batch: TokenBatch, advantage: Tensor, scored: Tensor) -> Tensor | None:
    """The product of the weights that are known before the update. scored: tokens of rows with a score, bool [B, T]."""
    mask, product = batch.mask, None
    for choice in preset.weights:
        match choice:
            case TopEntropy(share=share, scope=scope):
                entropy = given(batch, "entropy", "the entropy mask")
                rule = token_weights.top_entropy if scope == "batch" else token_weights.top_of_row
                factor = rule(entropy, mask, share=share)
            case TopDependency(share=share):
                factor = token_weights.top_of_row(_dependency(batch), mask, share=share)
            case Divergence():
                rows = given(batch, "divergence", "the divergence within groups")
                _, index = torch.unique(batch.group, return_inverse=True)
                first = torch.stack([(index == slot).nonzero()[0, 0] for slot in range(int(index.max()) + 1)])
                factor = token_weights.divergence_weights(rows[first], mask, batch.group)
            case ClipCov(share=share, low=low, high=high):
                draw, found = given(batch, "draw", "Clip-Cov"), _covariance(batch, advantage, scored)
                factor = token_covariance.clip_cov_weight(found, draw, scored, share=share, low=low, high=high)
            case EngineMismatch():
                factor = _mismatch(choice, batch)
            case StepMeans():
                step = given(batch, "step", "the means of steps")
                factor = torch.ones(mask.shape, dtype=torch.float64)
                for number in sorted(set(step[mask.bool()].tolist())):
                    own = mask.bool() & (step == number)
                    factor[own] = float(mask.bool().sum() / own.sum())
            case OffPolicyMask():
                continue
        product = factor if product is None else product * factor
    return product


def _mismatch(choice: EngineMismatch, batch: TokenBatch) -> Tensor:
    old = given(batch, "old_log_prob", "the engine's correction")
    sampler = given(batch, "sampler_log_prob", "the engine's correction")
    bounds = {"low": choice.low, "high": choice.high}
    return token_weights.mismatch_weights(old, sampler, batch.mask, level=choice.level, mode=choice.mode, **bounds)


def _entropy_bounds(preset: Preset, batch: TokenBatch) -> Tensor | None:
    for choice in preset.regularisers:
        if isinstance(choice, EntropyBand) and choice.bounds == "quantile":
            entropy = given(batch, "entropy", "the entropy band's quantiles")
            chosen = entropy[band_tokens(choice, batch.mask, batch.weight)].double()
            return torch.stack([chosen.quantile(choice.low), chosen.quantile(choice.high)])
    return None


def band_tokens(choice: EntropyBand, mask: Tensor, weight: Tensor | None) -> Tensor:
    """The tokens that an entropy band looks at, bool [B, T]."""
    kept = mask.bool()
    return kept & (weight != 0) if choice.bounds == "quantile" and weight is not None else kept
