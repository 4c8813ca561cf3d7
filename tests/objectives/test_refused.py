"""What no function of `genrl.objectives`, nor of a method's own mathematics, takes: each says why."""

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from torch import Tensor

from genrl.diffusion.forward import direct
from genrl.diffusion.methods.ddpo.train import prompt_advantages
from genrl.diffusion.methods.dynamic_tree_rpo import train as tree_rpo
from genrl.diffusion.methods.grpo_guard import train as guard
from genrl.diffusion.methods.paco_grpo.train import log_tame
from genrl.diffusion.methods.prdp.train import prdp_loss
from genrl.diffusion.methods.prompt_rl.train import joint_rewards
from genrl.objectives import actor_critic, credit, episodes, groups, matching, policy_losses, preferences, tokens
from genrl.objectives import token_advantages as ta
from genrl.objectives import token_credit as tc
from genrl.objectives import token_regularisers as tr
from genrl.objectives import token_surrogates as ts
from genrl.objectives import token_weights as tw
from genrl.vlm.methods.opd.train import generalised_divergence

ZERO, ONE, TWO, PAIR, HALF = torch.zeros(2), torch.ones(1), torch.ones(2, 3), torch.tensor([0, 0]), torch.tensor([0.5])
CHUNK, YES, NO = torch.zeros(1, 1, 3), torch.tensor([[True]]), torch.tensor([[False]])
PRDP = [torch.zeros(2, 4, 3)] * 3
NEW, OLD, MASK = torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)


def actions(rewards: Tensor = CHUNK, executed: int = 2, values: Tensor = CHUNK) -> object:
    return episodes.action_gae(rewards, torch.tensor([[executed]]), NO, YES, values, NO.double(), gamma=0.5, lam=0.5)


def nft(beta: float) -> object:
    return matching.diffusion_nft_loss(TWO, TWO, TWO, TWO, 0.5, torch.ones(2), beta=beta)


def prdp(rewards: Tensor = torch.zeros(2, 4), ref: Tensor = PRDP[0], **options: object) -> object:
    return prdp_loss(PRDP[0], ref, PRDP[0], rewards, **{"beta": 1.0, "clip": 0.1, **options})


ROWS: list[tuple[str, Callable[[], object]]] = [
    (r"samples \[1\] are infinite", lambda: groups.group_advantages(torch.tensor([0.0, inf]), PAIR, scale="group")),
    ("one length", lambda: groups.group_advantages(torch.zeros(3), PAIR, scale="group")),
    ("integers", lambda: groups.group_advantages(ZERO, ZERO, scale="group")),
    ("as many weights", lambda: groups.gdpo_advantages([ZERO], [1.0, 2.0], PAIR)),
    ("all reward weights are 0", lambda: groups.gdpo_advantages([ZERO], [0.0], PAIR)),
    ("low < high", lambda: groups.within(ZERO, PAIR, low=1.0, high=0.5)),
    ("reward 0 varies enough", lambda: log_tame([torch.tensor([-1.5, 4.0]), HALF.expand(2)], [1.0, 1.0])),
    ("one prompt per reward", lambda: prompt_advantages(ZERO, ["a"], {})),
    ("each refinement a picture", lambda: joint_rewards(TWO, torch.zeros(2, 4))),
    ("same prompts", lambda: joint_rewards(TWO, torch.zeros(1, 2))),
    ("width: no leaf of a tree is kept", lambda: credit.width_pruned(PAIR - 1, PAIR, ZERO.bool(), last_split=0)),
    ("4 samples cannot be kept of groups of 3", lambda: credit.max_variance(TWO, 4)),
    ("cannot have been executed", lambda: actions(executed=4)),
    (r"must be \[T, B, C\]", lambda: actions(values=CHUNK[..., 0])),
    ("no entry is valid", lambda: episodes.normalise_advantages(ONE, ONE < 0, eps=1e-5)),
    ("NaN", lambda: episodes.normalise_advantages(torch.tensor([1.0, nan]), eps=1e-5)),
    ("one shape", lambda: episodes.gae(*[torch.zeros(3, 1)] * 4, torch.zeros(3, 2), discount=0.9, lam=0.9)),
    ("exceed 1", lambda: actor_critic.dual_clip(ONE, ONE, 1.0)),
    ("old_values", lambda: actor_critic.value_loss(ONE, ONE, clip=0.2)),
    ("negative temperature", lambda: actor_critic.advantage_weights(ONE, ONE, temperature=-1.0, largest=1.0)),
    ("cannot be negative", lambda: policy_losses.clipped_surrogate(ZERO, ZERO, ZERO, -torch.ones(2), 0.1)),
    ("not an action", lambda: policy_losses.kl_gaussian(TWO, TWO, torch.tensor([[0.5], [0.0]]))),
    ("sigma 0", lambda: tree_rpo.velocity_towards(TWO, TWO, 0.0)),
    ("must be positive", lambda: tree_rpo.dynamic_clip_bounds(ZERO, low=0.0, high=1e-4, sensitivity=0.5)),
    ("not an action", lambda: guard.guard_log_ratio(TWO, TWO, TWO, torch.zeros(2, 1))),
    ("delta must be positive", lambda: guard.guard_surrogate(ZERO, ZERO, -0.1, 1e-6, 1e-6)),
    ("beta must be positive", lambda: nft(0.0)),
    ("clip must be positive", lambda: matching.nft_reward_weight(ONE, 0.0)),
    ("differentiable reward", lambda: direct.reward_loss(torch.ones(2))),
    ("beta must be positive", lambda: preferences.pair_loss("hinge", ZERO, ZERO, beta=0.0)),
    ("give their numbers", lambda: preferences.pair_loss("ipo", ZERO, ZERO, beta=1.0)),
    ("clip in", lambda: preferences.step_preference_loss(*[ZERO] * 5, beta=1.0, clip=1.0)),
    ("one length", lambda: preferences.preference_pairs(ZERO, torch.zeros(3).long())),
    (r"\[prompts, samples\]", lambda: prdp(torch.zeros(2, 2))),
    ("one shape", lambda: prdp(ref=PRDP[0][..., :2])),
    ("K weights", lambda: ta.normalise_then_sum(torch.zeros(2, 2), [1.0], PAIR)),
    ("one prompt per group", lambda: ta.smoothed_advantages(ZERO, PAIR, ["a", "b"], {})),
    ("tau must be positive, got 0", lambda: ts.classification_loss(ZERO, ZERO, PAIR, tau=0.0)),
    (
        r"2 actions need values \[3, L\] and lengths in 1 .. L",
        lambda: tc.token_gae(torch.zeros(3, 3), torch.tensor([4, 1]), ZERO, ZERO, gamma=0.9),
    ),
    ("sequence_geo", lambda: tw.mismatch_weights(NEW, OLD, MASK, level="batch")),
    ("cap must be above 1 . high", lambda: ts.clip_surrogate(NEW, OLD, -ONE, MASK, cap=1.2)),
    ("above 1", lambda: ts.log_clamp_surrogate(NEW, OLD, ONE, MASK, delta=1.0)),
    (r"per row \[B\], got \[1, 2\]", lambda: ts.sequence_clip_surrogate(NEW, OLD, MASK, MASK)),
    ("one advantage per row", lambda: ts.geometric_mean_surrogate(NEW, OLD, MASK, MASK)),
    (r"per row or per token of \[1, 2\] is needed, got \[4\]", lambda: tokens.per_token(torch.ones(4), MASK)),
    ("longest allowed completion: got length None", lambda: tokens.aggregate(NEW, MASK, "const")),
    ("unknown aggregation 'mean'; known: seq_mean, token_mean", lambda: tokens.aggregate(NEW, MASK, "mean")),
    ("not the KL of the limit", lambda: generalised_divergence(HALF.log(), HALF.log(), 0.999)),
    ("low <= high", lambda: tr.entropy_band(ZERO, 1.0, 0.2)),
    ("between 1 and the maximum", lambda: tr.overlong_penalty(PAIR, maximum=20, buffer=0)),
]


@pytest.mark.parametrize(("says", "call"), ROWS, ids=[row[0][:40] for row in ROWS])
def test_refused(says: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=says):
        call()
