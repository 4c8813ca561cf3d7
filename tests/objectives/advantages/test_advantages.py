"""Advantages: golden trainers_stat_tracking, and what holds for any rewards."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.diffusion.methods.ddpo.train import History, prompt_advantages
from genrl.diffusion.methods.paco_grpo import train as aggregation
from genrl.diffusion.methods.prompt_rl import train
from genrl.diffusion.policy import rewriter
from genrl.mdp import kernels
from genrl.objectives import episodes, policy_losses
from genrl.objectives import groups as advantages
from genrl.objectives import token_regularisers as rs
from genrl.objectives.groups import group_advantages
from tests.golden_cases import Arrays

NAN = float("nan")


def test_golden_columns(golden) -> None:
    """Left out: what nothing here has, PaCo-RL's ranks, MixGRPO's trimmed sums, Flow-GRPO's raw and best rewards."""
    a = Arrays(golden("trainers_stat_tracking"), double=True)
    group, reward, weights = a.given("in_group_id"), a.given("in_reward"), a.given("in_weights").tolist()
    parts = [reward, a.given("in_reward_b"), a.given("in_reward_c")]
    weighted = sum(w * part for w, part in zip(weights, parts, strict=True))
    statistics = advantages.group_statistics(reward, group)
    a.near("out_flow_grpo_zero_std_ratio", torch.tensor(statistics.zero_std_ratio), 1e-6)
    a.near("out_flow_grpo_reward_std_mean", torch.tensor(statistics.mean_std), 1e-6)
    order = a.given("in_contiguous_order")
    for name, slots in (("out_dancegrpo_group", group), ("out_dancegrpo_global", torch.zeros_like(group))):
        ours = advantages.group_advantages(reward, slots, scale="group", eps=1e-8, ddof=1)[order]
        a.check(name, ours, rtol=1e-3, atol=1e-4)
    pairs = advantages.best_and_worst(reward, group, pair_in_ties=True)
    for scale in ("group", "global"):
        plain = advantages.group_advantages(reward, group, scale=scale)
        summed = advantages.group_advantages(weighted, group, scale=scale, eps=1e-6, eps_mode="floor")
        ours = {
            rf"out_diffusionnft_{scale}": (plain, 1e-9),
            rf"out_(flow|adv)_grpo_grpo_{scale}": (plain, 1e-9),
            rf"out_(flow|adv)_grpo_dpo_{scale}": (pairs, 1e-9),
            rf"out_paco_grpo_{scale}": (summed, 1e-9),
            rf"out_flow_factory_sum_{scale}_.*": (summed, 1e-4),
            r"out_flow_factory_gdpo_.*": (advantages.gdpo_advantages(parts, weights, group), 1e-4),
        }
        for pattern, (value, tolerance) in ours.items():
            for actual in a.matches(pattern):
                want = a.given(actual[0])  # of several timesteps: the same reward at each
                a.near(actual[0], value if want.dim() < 2 else value[:, None].expand_as(want), tolerance)
    a.all_used("out_.*", but="out_(paco_rank_grpo|mixgrpo|(flow|adv)_grpo_(rwr|sft)).*")


# What holds for any rewards ------------------------------------------------------------------------------------------
REWARDS = st.lists(st.one_of(st.floats(-100, 100), st.just(NAN), st.just(0.5)), min_size=1, max_size=24)
SCALES = st.sampled_from(["group", "global", "none"])


def naive(rewards: list[float], group: list[int], scale: str, eps: float, ddof: int) -> list[float]:
    def spread(values: list[float]) -> float:
        return float(np.std(values, ddof=ddof)) if len(values) > ddof and len(set(values)) > 1 else 0.0

    scored = [r for r in rewards if r == r]
    result = []
    for r, g in zip(rewards, group, strict=True):
        mates = [x for x, h in zip(rewards, group, strict=True) if h == g and x == x]
        if r != r or len(set(mates)) < 2:
            result.append(0.0)
            continue
        divisor = {"group": spread(mates) + eps, "global": spread(scored) + eps, "none": 1.0}[scale]
        result.append((r - math.fsum(mates) / len(mates)) / divisor)
    return result


@given(REWARDS, st.data(), SCALES, st.integers(0, 1))
def test_it_is_the_definition(rewards: list[float], data: st.DataObject, scale: str, ddof: int) -> None:
    size = len(rewards)
    group = data.draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size))
    ours = advantages.group_advantages(torch.tensor(rewards), torch.tensor(group), scale=scale, ddof=ddof)
    stored = torch.tensor(rewards).double().tolist()
    want = torch.tensor(naive(stored, group, scale, 1e-4, ddof), dtype=torch.float64)
    assert torch.allclose(ours, want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("value", [0.1, 0.9, 1e6 + 0.1])
@pytest.mark.parametrize("scale", ["group", "global", "none"])
def test_equal_rewards_give_exactly_zero(value: float, scale: advantages.Scale) -> None:
    """Their mean need not be exact in floating point; the advantage is exactly zero all the same, without an epsilon
    too, alone and beside a group that differs."""
    rewards = torch.tensor([*[value] * 7, NAN, 0.0, 1.0], dtype=torch.float64)
    group = torch.tensor([*[0] * 8, 1, 1])
    for options in ({"eps": 0.0}, {"eps": 1e-8, "eps_mode": "floor"}):
        for count in (8, 10):
            ours = advantages.group_advantages(rewards[:count], group[:count], scale=scale, **options)
            assert (ours[:8] == 0).all()
        assert ours[8] == -ours[9] < 0


def test_a_small_spread_on_a_large_mean_keeps_its_digits() -> None:
    """Two passes: the released float32 sums of squares are off by a factor of 27 here."""
    rewards = 1000 + 0.01 * torch.tensor([-1.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    ours = advantages.group_advantages(rewards, torch.zeros(4).long(), scale="group", eps=0.0)
    want = (rewards - rewards.mean()) / rewards.std(unbiased=False)
    assert torch.allclose(ours, want, rtol=1e-9)


def test_clipping_comes_last_and_who_is_at_the_mean_of_the_group_is_learnt_from() -> None:
    rewards, group = torch.tensor([0.0] * 99 + [1.0]), torch.zeros(100).long()
    free = advantages.group_advantages(rewards, group, scale="group")
    assert free.max() > 9
    assert torch.equal(advantages.group_advantages(rewards, group, scale="group", clip=5.0), free.clamp(-5, 5))
    rewards, group = torch.tensor([0.0, 0.5, 1.0, NAN, 0.7, 0.7, 0.2]), torch.tensor([0, 0, 0, 0, 1, 1, 2])
    assert advantages.group_advantages(rewards, group, scale="group")[1] == 0
    assert advantages.informative(rewards, group).tolist() == [True] * 3 + [False] * 4


def test_statistics_count_what_gives_no_update_and_pairs_prefer_nothing_among_equals() -> None:
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, NAN, 3.0, 7.0])
    now = advantages.group_statistics(rewards, group)
    assert now.zero_std_ratio == 0.75  # equal scores, one score left, one sample
    assert now.mean_std == pytest.approx(0.5 / 4)
    empty = advantages.group_statistics(torch.tensor([NAN, NAN]), torch.tensor([0, 0]))
    assert empty.zero_std_ratio == 1 and math.isnan(empty.mean_std)
    group = torch.tensor([0, 0, 0, 1, 1, 2])
    rewards = torch.tensor([0.5, 0.5, 0.5, 1.0, NAN, 3.0])
    assert (advantages.best_and_worst(rewards, group) == 0).all()
    assert advantages.best_and_worst(rewards, group, pair_in_ties=True).tolist() == [-1, 1, 0, 0, 0, 0]


def test_a_sample_without_one_of_the_scores_has_none() -> None:
    group = torch.zeros(4).long()
    one, other = torch.tensor([0.0, 1.0, 2.0, 4.0]), torch.tensor([1.0, NAN, 0.0, 5.0])
    kept = torch.tensor([0, 2, 3])
    ours = advantages.gdpo_advantages([one, other], [1.0, 0.5], group)
    assert ours[1] == 0
    want = advantages.gdpo_advantages([one[kept], other[kept]], [1.0, 0.5], group[kept])
    assert torch.allclose(ours[kept], want, atol=1e-12)
    monitored = advantages.gdpo_advantages([one, other], [1.0, 0.0], group)  # a monitor's missing score costs nothing
    assert monitored[1] != 0


# -- Several rewards to one: golden trainers_paco_log_tame, and properties
def test_golden_columns_aggregation(golden) -> None:
    """Left out: means of other kinds, which nothing here has."""
    a = Arrays(golden("trainers_paco_log_tame"))
    rewards, weights, group = list(a.given("in_rewards")), a.given("in_weights").tolist(), a.given("in_group_id")
    weighted = sum(w * reward for w, reward in zip(weights, rewards, strict=True))
    floor = {"eps": 1e-6, "eps_mode": "floor"}
    a.check("out_cv", [aggregation.coefficient_of_variation(r) for r in rewards])
    released = aggregation.log_tame_advantages(rewards, weights, group, variant="released")
    a.check("out_tracker_with_log_tame_fn", released)
    name = "out_released_default_weighted_sum_global"
    a.check(name, advantages.group_advantages(weighted, group, scale="global", **floor))
    for actual in a.matches(r"out_log_tame_mean_then_grpo_(group|global)"):
        a.check(actual[0], aggregation.log_tame_advantages(rewards, weights, group, scale=actual[1]))
    for actual in a.matches(r"out_weighted_advantage_sum_(group|global)"):
        parts = [advantages.group_advantages(reward, group, scale=actual[1], **floor) for reward in rewards]
        a.check(actual[0], sum(w * part for w, part in zip(weights, parts, strict=True)))
    a.check("out_log_tame_mean", aggregation.log_tame(rewards, weights))
    a.all_used("out_.*", but=r"out_(geometric|harmonic)_mean|out_log_tame_(median|[\dp]+)")


def test_a_monitor_changes_nothing_and_a_missing_score_leaves_the_sample_out() -> None:
    group = torch.zeros(4).long()
    one, other = torch.tensor([0.1, 0.9, 0.2, 0.3]), torch.tensor([3.0, NAN, 3.5, 3.0])
    wild = torch.tensor([0.0, 1e6, NAN, -9.0])
    without = aggregation.log_tame([one, other], [1.0, 1.0])
    assert torch.equal(aggregation.log_tame([one, other, wild], [1.0, 1.0, 0.0])[[0, 2, 3]], without[[0, 2, 3]])
    assert without[1].isnan()
    for variant in ("paper", "released"):
        got = aggregation.log_tame_advantages([one, other], [1.0, 1.0], group, variant=variant)
        assert got[1] == 0 and got.isfinite().all()


# -- DDPO's per-prompt statistics: golden ddpo_prompt_tracker, and properties
def test_golden_successive_calls(golden) -> None:
    data = golden("ddpo_prompt_tracker")
    sizes = {"buffer_size": int(data["buffer_size"]), "min_count": int(data["min_count"])}
    history: History = {}
    for prompts, rewards, want in zip(data["prompt_id"], data["rewards"], data["advantages"], strict=True):
        names = [str(p) for p in prompts.tolist()]
        got, history = prompt_advantages(torch.from_numpy(rewards), names, history, **sizes)
        assert (got - torch.from_numpy(want)).abs().max() <= 1e-9 * max(1.0, abs(want).max())
        history = json.loads(json.dumps(history))  # what a checkpoint does to it


def test_a_missing_score_has_no_advantage_and_is_not_remembered() -> None:
    """a is compared with 0 and 1, its last two; b, of which there are too few, with the 1 and the 5 of this call."""
    history: History = {"a": [7.0, 0.0]}
    rewards = torch.tensor([1.0, NAN, 5.0])
    got, after = prompt_advantages(rewards, ["a", "a", "b"], history, buffer_size=2, min_count=2)
    assert got.tolist() == pytest.approx([1.0, 0.0, 1.0], abs=1e-5)
    assert history == {"a": [7.0, 0.0]} and after == {"a": [0.0, 1.0], "b": [5.0]}
    equal, _ = prompt_advantages(torch.full((7,), 0.1), ["a"] * 7, {"a": []}, min_count=3)
    assert (equal == 0).all()


# -- Masks, returns and groups of episodes (their golden arrays: test_gae)
def test_the_row_after_a_done_is_no_transition_and_bounds_of_the_filter_count_in() -> None:
    done = torch.tensor([[False, True], [True, False], [False, False], [False, True]])
    valid = episodes.valid_transitions(done, carried=torch.tensor([True, False]))
    assert valid.tolist() == [[False, True], [True, False], [False, True], [True, True]]
    value, group = torch.full((10,), 0.9), torch.zeros(10, dtype=torch.long)
    assert episodes.informative_groups(value, group, low=0.1, high=0.9).all()
    assert not episodes.informative_groups(value, group, low=0.1, high=0.89).any()


# -- PromptRL: golden promptrl_joint, and properties
def test_golden_joint_step(golden) -> None:
    a = Arrays(golden("promptrl_joint"))
    size, retained = a.given("num_generations_retained").tolist()
    total = train.joint_rewards(a.given("reward_generation"), a.given("format_refined"))
    prompts = len(total)
    group = torch.arange(prompts).repeat_interleave(size)
    advantages = group_advantages(total.flatten(), group, scale="group", eps=1e-4, clip=5.0).view(prompts, size)
    refined = advantages[:, : size - retained].flatten()
    a.check("reward_total", total)
    a.check("advantages", advantages)
    a.check("advantages_refined", refined)
    log_prob, reference = a.given("lm_logp").requires_grad_(), a.given("lm_ref_logp")
    mask = rewriter.completion_mask(a.given("lm_completion_ids"), int(a.given("lm_eos")))
    weight = a.number("lm_kl_coef")
    loss = train.rewriter_loss(log_prob, reference, refined, mask, kl_weight=weight).mean()
    a.checks("lm", mask=mask.double(), loss=loss, grad=torch.autograd.grad(loss, log_prob)[0])
    clip, beta = a.given("dit_clip_beta").tolist()
    mean, std = a.given("dit_mean").requires_grad_(), a.given("dit_std")
    per_edge = advantages.flatten().repeat_interleave(len(mean) // advantages.numel())
    density = kernels.log_prob(a.given("dit_next"), mean, std)
    surrogate = policy_losses.clipped_surrogate(density, a.given("dit_old_logp"), per_edge, clip, clip)
    kl = policy_losses.kl_gaussian(mean, a.given("dit_ref_mean"), std)
    loss = (surrogate.loss + beta * kl).mean()
    a.checks("dit", adv_per_edge=per_edge, kl=kl, loss=loss, grad_mean=torch.autograd.grad(loss, mean)[0])
    a.all_used(but="tags_per_prompt")  # one for each prompt: groups are the same


def test_masked_tokens_may_hold_anything_and_retained_prompts_get_the_mean_format_score() -> None:
    """And the gradient of a rewriter's loss is REINFORCE's."""
    log_prob = torch.tensor([[-1.0, -2.0, float("nan")], [-0.5, float("inf"), -3.0]], requires_grad=True)
    reference = torch.tensor([[-1.0, -2.0, 5.0], [-0.5, 0.0, float("nan")]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    advantage = torch.tensor([2.0, -1.0])
    loss = train.rewriter_loss(log_prob, reference, advantage, mask, kl_weight=0.3)
    loss.sum().backward()
    assert torch.allclose(loss.detach(), -advantage)
    assert log_prob.grad is not None and log_prob.grad.tolist() == [[-1.0, -1.0, 0.0], [1.0, 0.0, 0.0]]
    generation, formats = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.0, 1.0]])
    assert train.joint_rewards(generation, formats).tolist() == [[1.0, 3.0, 3.5]]
    assert train.joint_rewards(generation, torch.zeros(1, 0)).tolist() == [[1.0, 2.0, 3.0]]


# -- Rewards from lengths, log-probabilities, views and scores
def test_rewards_from_lengths_log_probabilities_and_views() -> None:
    """The KL in a reward costs where the policy is surer than the reference; confidence is of the answer's tokens."""
    penalty = rs.overlong_penalty(torch.tensor([10, 16, 18, 20, 30]), maximum=20, buffer=4)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    reference = torch.tensor([[-9.0, math.log(0.5)], [-9.0, -0.001], [torch.nan, torch.nan]])
    answer = torch.tensor([[0, 1], [0, 1], [0, 0]])
    assert torch.allclose(rs.answer_confidence(reference, answer), torch.tensor([0.5, 0.95, 0.95]), atol=1e-5)
    log_prob = torch.tensor([[-1.0, -2.0, torch.nan]], requires_grad=True)
    reference, mask = torch.tensor([[-3.0, -1.0, torch.nan]]), torch.tensor([[1, 1, 0]])
    rewards = rs.with_kl(torch.tensor([[0.0, 1.0, torch.nan]]), log_prob, reference, mask, beta=0.1)
    assert torch.allclose(rewards, torch.tensor([[-0.2, 1.1, 0.0]])) and not rewards.requires_grad
    assert rs.over_views(torch.tensor([[1.0, 3.0], [2.0, 2.0]]), "mean").tolist() == [2.0, 2.0]
