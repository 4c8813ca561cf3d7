"""What `estimate` makes of each choice of a preset, by its value; and the regularisers of `policy_loss`."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from genrl.objectives import token_advantages, token_regularisers
from genrl.objectives.groups import group_advantages
from genrl.objectives.tokens import quantiles, token_count
from genrl.vlm.methods.policy_loss import estimate, policy_loss
from genrl.vlm.recipe import shaping
from genrl.vlm.recipe.advantages import GroupAdvantage, RankQuantiles, WhitenedGroups, WhitenedReturns
from genrl.vlm.recipe.losses import EntropyBand, EntropyBonus, EntropyPenalty, Perception
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.recipe.surrogates import Clip
from genrl.vlm.recipe.weights import TopEntropyOfRow
from genrl.vlm.rollout.token_batch import TokenBatch
from tests.vlm.rollouts import rollout

CENTRED = Preset(GroupAdvantage(scale="none"), Clip(), "seq_mean")


def advantage(preset: Preset, batch: TokenBatch) -> Tensor:
    return estimate(preset, batch).batch.advantage


def centred(rewards: Tensor, batch: TokenBatch) -> Tensor:
    return group_advantages(rewards, batch.group, scale="none")


def test_terms_are_added_to_the_rewards_before_the_estimator() -> None:
    batch = rollout()
    lengths = token_count(batch.mask)
    log_ratio = torch.where(batch.mask, batch.old_log_prob - batch.ref_log_prob, 0.0).sum(1)
    confidence = token_regularisers.answer_confidence(batch.extra["ema"], batch.extra["answer_mask"])
    bonus = token_regularisers.consistency_bonus(batch.extra["accuracy"], confidence, batch.group)
    wanted = {
        shaping.OverlongPenalty(maximum=6, buffer=3): token_regularisers.overlong_penalty(lengths, maximum=6, buffer=3),
        shaping.KlInReward(beta=0.3): -0.3 * log_ratio,  # the surer the policy beside the reference, the less
        shaping.ConsistencyBonus(): bonus,
        shaping.ReferenceProbability(baseline=False): 0.9 * batch.extra["reference_probability"][:, 0],
    }
    for term, value in wanted.items():
        got = advantage(replace(CENTRED, reward_terms=(term,)), batch)
        assert torch.allclose(got, centred(batch.rewards + value, batch)), term
        assert not torch.allclose(got, centred(batch.rewards, batch)), term
    both = replace(CENTRED, reward_terms=tuple(wanted))
    assert torch.allclose(advantage(both, batch), centred(batch.rewards + sum(wanted.values()), batch))


def test_transforms_in_their_order() -> None:
    batch = rollout()
    plain = advantage(CENTRED, batch)
    wanted = {
        shaping.ClampAdvantage(limit=0.2): plain.clamp(-0.2, 0.2),
        shaping.SigmaFilter(limit=0.4): torch.where(plain.abs() > 0.4, 0.0, plain),
        shaping.BatchNormalise(): (plain - plain.mean()) / (plain.std() + 1e-8),
        shaping.Uncertainty(): plain
        * torch.exp(-0.2 * token_advantages.score_uncertainty(batch.extra["scores"], batch.group)),
    }
    for transform, value in wanted.items():
        assert torch.allclose(advantage(replace(CENTRED, transforms=(transform,)), batch), value), transform
    first, second = shaping.BatchNormalise(), shaping.ClampAdvantage(limit=0.2)
    one = advantage(replace(CENTRED, transforms=(first, second)), batch)
    assert not torch.allclose(one, advantage(replace(CENTRED, transforms=(second, first)), batch))


def test_a_reward_of_the_row_is_at_its_last_token() -> None:
    """With gamma 0 only that token has a return: all others share one value, below and above."""
    batch = rollout()
    last = token_count(batch.mask) - 1
    got = advantage(Preset(WhitenedReturns(gamma=0.0), Clip(), "seq_mean"), batch)
    at_end = torch.zeros_like(batch.mask)
    at_end[torch.arange(len(last)), last] = True
    elsewhere = got[batch.mask & ~at_end]
    assert torch.allclose(elsewhere, elsewhere[0].expand_as(elsewhere))
    ranks = got[at_end].argsort()
    assert torch.equal(ranks, batch.rewards.argsort())
    full = advantage(Preset(WhitenedReturns(), Clip(), "seq_mean"), batch)
    whitened = token_advantages.whitened(batch.rewards[:, None].expand(batch.mask.shape), batch.mask)
    assert torch.allclose(full, whitened)
    baseline = advantage(Preset(WhitenedGroups(), Clip(), "seq_mean"), batch)
    centred = group_advantages(batch.rewards, batch.group, scale="none")
    assert torch.allclose(baseline, token_advantages.whitened(centred[:, None].expand(batch.mask.shape), batch.mask))


def test_the_kl_in_token_rewards_is_at_the_tokens() -> None:
    batch = replace(rollout(), rewards=torch.zeros(12).double())
    preset = Preset(WhitenedReturns(gamma=0.0), Clip(), "seq_mean", reward_terms=(shaping.KlInReward(beta=0.5),))
    ratio = batch.old_log_prob - batch.ref_log_prob
    assert torch.allclose(advantage(preset, batch), token_advantages.whitened(-0.5 * ratio, batch.mask))
    given = replace(batch, extra={**batch.extra, "token_rewards": ratio})
    plain = replace(preset, reward_terms=())
    assert torch.allclose(advantage(plain, given), token_advantages.whitened(ratio, batch.mask))
    with pytest.raises(ValueError, match="baseline is subtracted from rewards"):
        advantage(replace(plain, advantage=WhitenedGroups()), given)


# --- regularisers, by their value
def part(preset: Preset, batch: TokenBatch, name: str) -> Tensor:
    return policy_loss(preset, estimate(preset, batch).batch).metrics[f"loss/{name}"]


def test_a_penalty_lowers_the_entropy_and_a_bonus_raises_it() -> None:
    batch = rollout()
    entropy = -batch.log_prob[batch.mask].mean()
    for coefficient in (0.06, -0.01):
        preset = replace(CENTRED, regularisers=(EntropyPenalty(coefficient=coefficient),))
        assert torch.allclose(part(preset, batch, "entropy_penalty"), coefficient * entropy)
    preset = replace(CENTRED, regularisers=(EntropyBonus(coefficient=0.01),))
    wanted = -0.01 * batch.extra["policy_entropy"][batch.mask].mean()
    assert torch.allclose(part(preset, batch, "entropy_bonus"), wanted)


def test_the_band_is_of_each_task_with_its_share_of_rows() -> None:
    batch = rollout()
    task = batch.extra["task"]
    preset = replace(CENTRED, regularisers=(EntropyBand(coefficient=2.0, band=(5.0, 6.0)),))
    entropies = [-batch.log_prob[batch.mask & (task == k)[:, None]].mean() for k in (0, 1)]
    shares = [(task == k).double().mean() for k in (0, 1)]
    wanted = 2.0 * sum(share * (5.0 - entropy) for share, entropy in zip(shares, entropies, strict=True))
    assert torch.allclose(part(preset, batch, "entropy_band"), wanted)
    one_task = replace(batch, extra={k: value for k, value in batch.extra.items() if k != "task"})
    assert torch.allclose(part(preset, one_task, "entropy_band"), 2.0 * (5.0 + batch.log_prob[batch.mask].mean()))


def test_the_bands_quantiles_are_of_the_tokens_that_are_weighted() -> None:
    batch = rollout()
    batch = replace(batch, extra={"entropy": batch.extra["entropy"]})
    band = EntropyBand(coefficient=1.0, band=(0.25, 0.75), bounds="quantile")
    preset = replace(CENTRED, weights=(TopEntropyOfRow(share=0.4),), regularisers=(band,))
    ready = estimate(preset, batch).batch
    chosen = batch.extra["entropy"][ready.weight.bool()]
    low, high = ready.extra["entropy_bounds"][0]
    assert torch.allclose(torch.stack([low, high]), torch.stack([chosen.quantile(0.25), chosen.quantile(0.75)]))
    entropy = -batch.log_prob[ready.weight.bool()].mean()
    wanted = (entropy - high).clamp(min=0) + (low - entropy).clamp(min=0)
    assert torch.allclose(part(preset, batch, "entropy_band"), wanted)
    large = torch.arange(2.0**24 + 2, dtype=torch.float64)
    assert quantiles(large, (0.25, 1.0)).tolist() == [0.25 * (2**24 + 1), 2**24 + 1]
    assert quantiles(large[:0], (0.1, 0.9)).tolist() == [0.0, 0.0]


def test_rows_without_a_degraded_twin_are_left_out_of_the_perception_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Perception, "eta", 0.0)
    batch = rollout()
    degraded = batch.extra["degraded"].clone()
    degraded[6:] = torch.nan
    preset = replace(CENTRED, regularisers=(Perception(coefficient=0.1),))
    some = part(preset, replace(batch, extra={"degraded": degraded}), "perception")
    first = estimate(preset, replace(batch, extra={"degraded": batch.extra["degraded"]})).batch
    half = policy_loss(preset, first.select(torch.arange(6))).metrics["loss/perception"]
    assert torch.allclose(some, 2 * half)  # K is a mean over the tokens of the call


def test_ranks_of_a_task_are_those_of_all_its_answers() -> None:
    """Against NumPy: ranks among the rows of a task, as quantiles of the standard normal."""
    batch = rollout()
    chosen = replace(PRESETS["g2rpo"], advantage=RankQuantiles(task="task"))
    result = estimate(chosen, batch).batch.advantage.numpy()
    tasks, rewards = batch.extra["task"].numpy(), batch.rewards.numpy()
    for task in (0, 1):
        own = rewards[tasks == task]
        levels = (own.argsort().argsort() + 0.5) / len(own)
        assert np.allclose(result[tasks == task], [NormalDist().inv_cdf(level) for level in levels])
    assert not np.allclose(result, estimate(PRESETS["g2rpo"], batch).batch.advantage.numpy())
