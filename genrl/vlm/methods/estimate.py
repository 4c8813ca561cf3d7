"""From a preset and a whole rollout batch to advantages and token weights. No gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from genrl.objectives.advantages.groups import group_statistics
from genrl.objectives.surrogates.policy_losses import kl_k3
from genrl.objectives.tokens.token_advantages import Visits
from genrl.objectives.tokens.tokens import log_ratio, masked, token_mean
from genrl.vlm.methods.policy_loss import product
from genrl.vlm.recipe.advantages import KlInReward, WhitenedReturns
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.weights import EngineMismatch
from genrl.vlm.rollout.token_batch import TokenBatch


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
        advantage = torch.where(of_rows, torch.nan, advantage)  # no part of a transform's statistics
        for transform in preset.transforms:
            advantage = transform.changed(advantage, batch)
        advantage = torch.where(of_rows, 0.0, advantage)
        _, index, sizes = torch.unique(batch.group, return_inverse=True, return_counts=True)
        rows, tokens = len(batch.mask), int(batch.mask.bool().sum())
        ready = replace(
            batch, advantage=advantage, group_size=sizes[index], rows=rows, tokens=tokens, groups=len(sizes)
        )
        weight = product(*(choice.factor(ready) for choice in preset.weights))
        ready = replace(ready, weight=weight)
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
    """Those of `estimate`'s metrics that compare sampler and trainer, as they are logged. differs: what sampled is not
    the model as it is trained, so answers are weighted."""
    kinds = ("sampler_", "importance_") if differs else ("sampler_",)
    return {name.replace("_", "/", 1): value for name, value in metrics.items() if name.startswith(kinds)}
