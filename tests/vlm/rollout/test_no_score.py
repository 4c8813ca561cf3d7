"""A row without a score: with every preset it has no gradient, and the other rows learn as if it were not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from genrl.vlm.methods.policy_loss import estimate, policy_loss
from genrl.vlm.recipe.advantages import CriticAdvantage, Hierarchical, SemiOnline, TurnLeaveOneOut
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.recipe.shaping import BatchNormalise
from genrl.vlm.recipe.surrogates import KlCov
from genrl.vlm.recipe.weights import ClipCov
from genrl.vlm.rollout.token_batch import TokenBatch
from tests.vlm.rollouts import PROMPTS, preset, rollout

MISSING = 5
OTHERS = torch.tensor([k for k in range(12) if k != MISSING])
CREDITED = CriticAdvantage | Hierarchical | SemiOnline | TurnLeaveOneOut
JUDGED = sorted(name for name, one in PRESETS.items() if not isinstance(one.advantage, CREDITED) and one.output is None)
"""Presets whose advantages come from a reward of the row."""
OF_TEXTS = {"vppo", "q_hawkeye", "grpo_care"}
"""They read something of every row that is no score: pictures, numbers in the text, confidence."""


def unscored(seed: int = 0) -> TokenBatch:
    batch = rollout(seed, masked=True)
    rewards, components = batch.rewards.clone(), batch.extra["components"].clone()
    rewards[MISSING], components[MISSING] = torch.nan, torch.nan
    return replace(batch, rewards=rewards, extra={**batch.extra, "components": components})


def gradient(name: str, batch: TokenBatch) -> Tensor:
    """Of the loss without regularisers, by log-probabilities."""
    chosen = replace(preset(name), regularisers=())
    ready = estimate(chosen, batch, prompts=PROMPTS).batch
    log_prob = batch.log_prob.clone().requires_grad_()
    loss = policy_loss(chosen, ready.with_log_prob(log_prob)).loss
    loss.backward()
    assert loss.isfinite() and log_prob.grad is not None and log_prob.grad.isfinite().all()
    return log_prob.grad


@pytest.mark.parametrize("name", JUDGED)
def test_it_has_no_gradient(name: str) -> None:
    found = gradient(name, unscored())
    assert (found[MISSING] == 0).all(), "teaches"
    assert (found[OTHERS] != 0).any()


def test_gpg_counts_it_among_the_rows_that_add_nothing() -> None:
    batch = unscored()
    found = estimate(preset("gpg"), batch).batch.advantage
    alone = estimate(preset("gpg"), batch.select(OTHERS)).batch.advantage
    assert torch.allclose(found[OTHERS], 12 / 11 * alone) and found[MISSING] == 0


@pytest.mark.parametrize("name", [name for name in JUDGED if name not in OF_TEXTS | {"gpg"}])
def test_the_others_have_the_advantages_they_have_without_it(name: str) -> None:
    batch, chosen = unscored(), preset(name)
    found = estimate(chosen, batch, prompts=PROMPTS).batch.advantage
    alone = estimate(chosen, batch.select(OTHERS), prompts=PROMPTS).batch.advantage
    assert torch.allclose(found[OTHERS], alone) and (found[MISSING] == 0).all()


def test_group_losses_leave_it_out() -> None:
    """The sums over rows and groups are those of the other rows; only the divisor counts it."""
    for name in ("reg_grpo", "real"):
        found, alone = gradient(name, unscored()), gradient(name, unscored().select(OTHERS))
        divisor = 12 / 11 if name == "reg_grpo" else 1.0
        assert torch.allclose(found[OTHERS] * divisor, alone)


def test_a_group_loss_without_any_score_is_nothing() -> None:
    batch = replace(unscored(), rewards=torch.full((12,), torch.nan, dtype=torch.float64))
    for name in ("reg_grpo", "real", "dpo"):
        assert (gradient(name, batch) == 0).all()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_chosen_among_those_of_scored_rows(name: str) -> None:
    batch = unscored()
    chosen = preset(name)
    if name == "clip_cov":
        chosen = replace(chosen, weights=(ClipCov(share=0.1, low=0.0, high=100.0),))
    else:
        chosen = replace(chosen, surrogate=KlCov(share=0.3))
    ready = estimate(chosen, batch).batch
    alone = estimate(chosen, batch.select(OTHERS)).batch
    pick = (lambda one: one.weight) if name == "clip_cov" else (lambda one: one.extra["kl_cov"])
    assert torch.equal(pick(ready)[OTHERS], pick(alone))
    assert pick(ready)[MISSING].unique().tolist() == [1.0 if name == "clip_cov" else 0.0]


def test_a_normalised_batch_is_that_of_scored_rows() -> None:
    """Mean 0 and deviation 1 over eleven rows, not twelve."""
    chosen = replace(preset("grpo"), transforms=(BatchNormalise(),))
    found = estimate(chosen, unscored()).batch.advantage
    assert float(found[OTHERS].mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(found[OTHERS].std()) == pytest.approx(1.0, rel=1e-6)
