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
from genrl.objectives import episodes
from genrl.objectives import groups as advantages
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
            for found in a.matches(pattern):
                want = a.given(found[0])  # of several timesteps: the same reward at each
                a.near(found[0], value if want.dim() < 2 else value[:, None].expand_as(want), tolerance)
    a.all_used("out_.*", but="out_(paco_rank_grpo|mixgrpo|(flow|adv)_grpo_(rwr|sft)).*")


# What holds for any rewards ------------------------------------------------------------------------------------------

REWARDS = st.lists(st.one_of(st.floats(-100, 100), st.just(NAN), st.just(0.5)), min_size=1, max_size=24)
SCALES = st.sampled_from(["group", "global", "none"])


def naive(rewards: list[float], group: list[int], scale: str, eps: float, ddof: int) -> list[float]:
    """The definition, one sample at a time."""

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


@given(REWARDS, st.data(), SCALES)
def test_order_and_names_of_groups_do_not_matter(rewards: list[float], data: st.DataObject, scale: str) -> None:
    size = len(rewards)
    group = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)))
    order = torch.tensor(data.draw(st.permutations(range(size))))
    values = torch.tensor(rewards, dtype=torch.float64)
    ours = advantages.group_advantages(values, group, scale=scale)
    moved = advantages.group_advantages(values[order], 1000 - 7 * group[order], scale=scale)
    assert torch.allclose(ours[order], moved, rtol=1e-9, atol=1e-9)


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


def test_clipping_comes_last() -> None:
    rewards = torch.tensor([0.0] * 99 + [1.0])
    group = torch.zeros(100).long()
    free = advantages.group_advantages(rewards, group, scale="group")
    assert free.max() > 9
    assert torch.equal(advantages.group_advantages(rewards, group, scale="group", clip=5.0), free.clamp(-5, 5))


def test_statistics_count_what_gives_no_update() -> None:
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, NAN, 3.0, 7.0])
    now = advantages.group_statistics(rewards, group)
    assert now.zero_std_ratio == 0.75  # equal scores, one score left, one sample
    assert now.mean_std == pytest.approx(0.5 / 4)
    empty = advantages.group_statistics(torch.tensor([NAN, NAN]), torch.tensor([0, 0]))
    assert empty.zero_std_ratio == 1 and math.isnan(empty.mean_std)


def test_pairs_prefer_nothing_among_equals() -> None:
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


def test_wrong_input_is_refused() -> None:
    group = torch.tensor([0, 0])
    with pytest.raises(ValueError, match=r"samples \[1\] are infinite"):
        advantages.group_advantages(torch.tensor([0.0, math.inf]), group, scale="group")
    with pytest.raises(ValueError, match="one length"):
        advantages.group_advantages(torch.zeros(3), group, scale="group")
    with pytest.raises(ValueError, match="integers"):
        advantages.group_advantages(torch.zeros(2), torch.zeros(2), scale="group")
    with pytest.raises(ValueError, match="'group', 'global' or 'none'"):
        advantages.group_advantages(torch.zeros(2), group, scale="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'add' or 'floor'"):
        advantages.group_advantages(torch.rand(2), group, scale="group", eps_mode="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as many weights"):
        advantages.gdpo_advantages([torch.zeros(2)], [1.0, 2.0], group)
    with pytest.raises(ValueError, match="all reward weights are 0"):
        advantages.gdpo_advantages([torch.zeros(2)], [0.0], group)


def test_a_sample_at_the_mean_of_its_group_is_learnt_from() -> None:
    rewards, group = torch.tensor([0.0, 0.5, 1.0, NAN, 0.7, 0.7, 0.2]), torch.tensor([0, 0, 0, 0, 1, 1, 2])
    assert advantages.group_advantages(rewards, group, scale="group")[1] == 0
    assert advantages.informative(rewards, group).tolist() == [True] * 3 + [False] * 4


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
    for found in a.matches(r"out_log_tame_mean_then_grpo_(group|global)"):
        a.check(found[0], aggregation.log_tame_advantages(rewards, weights, group, scale=found[1]))
    for found in a.matches(r"out_weighted_advantage_sum_(group|global)"):
        parts = [advantages.group_advantages(reward, group, scale=found[1], **floor) for reward in rewards]
        a.check(found[0], sum(w * part for w, part in zip(weights, parts, strict=True)))
    for found in a.matches(r"out_log_tame_(mean|median|[\dp]+)"):
        threshold = found[1] if found[1].startswith("m") else float(found[1].replace("p", "."))
        a.check(found[0], aggregation.log_tame(rewards, weights, threshold=threshold))
    a.all_used("out_.*", but="out_(geometric|harmonic)_mean")


TWO = st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), min_size=2, max_size=10)


@given(TWO, st.floats(0.01, 5.0))
def test_a_reward_is_tamed_exactly_where_it_varies_more_than_the_threshold(
    scores: list[tuple[float, float]], threshold: float
) -> None:
    rewards = [torch.tensor(column, dtype=torch.float64) for column in zip(*scores, strict=True)]
    got = aggregation.log_tame(rewards, [1.0, 2.0], threshold=threshold)
    want = torch.zeros_like(got)
    for weight, reward in zip((1.0, 2.0), rewards, strict=True):
        tamed = reward.std(unbiased=False) / (reward.mean() + 1e-6) > threshold
        want += weight * (torch.log(1 + reward) if tamed else reward)
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)


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


def test_what_cannot_be_tamed_is_refused() -> None:
    wide = torch.tensor([-1.5, 4.0], dtype=torch.float64)
    with pytest.raises(ValueError, match="reward 0 varies enough"):
        aggregation.log_tame([wide], [1.0], threshold=0.5)
    with pytest.raises(ValueError, match="'mean', 'median' or a number"):
        aggregation.log_tame([wide], [1.0], threshold="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'paper' or 'released'"):
        aggregation.log_tame_advantages([wide], [1.0], torch.zeros(2).long(), variant="code")  # type: ignore[arg-type]


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


CALLS = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.floats(-9, 9), st.just(NAN))), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


@given(CALLS, st.integers(1, 5), st.integers(1, 5))
def test_it_is_the_definition_prompt_statistics(
    calls: list[list[tuple[str, float]]], buffer_size: int, min_count: int
) -> None:
    history: History = {}
    seen: dict[str, list[float]] = {}
    for call in calls:
        rewards = torch.tensor([r for _, r in call], dtype=torch.float64)
        before = json.dumps(history)
        got, new = prompt_advantages(
            rewards, [p for p, _ in call], history, buffer_size=buffer_size, min_count=min_count
        )
        assert json.dumps(history) == before
        history = new
        for prompt, reward in call:
            if reward == reward:
                seen.setdefault(prompt, []).append(reward)
        everyone = [r for _, r in call if r == r]
        for value, (prompt, reward) in zip(got.tolist(), call, strict=True):
            recent = seen.get(prompt, [])[-buffer_size:]
            pool = torch.tensor(recent if len(recent) >= min_count else everyone, dtype=torch.float64)
            want = 0.0
            if reward == reward:
                want = float((reward - pool.mean()) / (pool.std(unbiased=False) + 1e-6))
            assert value == pytest.approx(want, rel=1e-6, abs=1e-6)
        assert {p: r[-buffer_size:] for p, r in seen.items()} == history


def test_equal_rewards_give_exactly_zero_prompt_statistics() -> None:
    got, _ = prompt_advantages(torch.full((7,), 0.1), ["a"] * 7, {"a": [0.1] * 0}, min_count=3)
    assert (got == 0).all()


def test_wrong_input_is_refused_prompt_statistics() -> None:
    with pytest.raises(ValueError, match="one prompt per reward"):
        prompt_advantages(torch.zeros(2), ["a"], {})
    with pytest.raises(ValueError, match=r"samples \[1\] are infinite"):
        prompt_advantages(torch.tensor([0.0, math.inf]), ["a", "b"], {})
    with pytest.raises(ValueError, match="at least 1"):
        prompt_advantages(torch.zeros(1), ["a"], {}, buffer_size=0)


# -- Masks, returns and groups of episodes (their golden arrays: test_gae)


def test_the_row_after_a_done_is_no_transition() -> None:
    done = torch.tensor([[False, True], [True, False], [False, False], [False, True]])
    valid = episodes.valid_transitions(done, carried=torch.tensor([True, False]))
    assert valid.tolist() == [[False, True], [True, False], [False, True], [True, True]]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=8, max_size=8))
def test_groups_that_always_or_never_succeed_are_left_out(returns: list[float]) -> None:
    value, group = torch.tensor(returns), torch.arange(8) // 4
    kept = episodes.informative_groups(value, group, low=0.1, high=0.9)
    advantage = episodes.episode_group_advantages(value, group)
    for g in range(2):
        members = group == g
        assert kept[members].all() == (0 < value[members].mean() < 1) and kept[members].any() == kept[members].all()
        assert advantage[members].sum().abs() < 1e-9
        assert (advantage[members] != 0).any() == kept[members].any()


def test_bounds_of_the_filter_count_in() -> None:
    value, group = torch.full((10,), 0.9), torch.zeros(10, dtype=torch.long)
    assert episodes.informative_groups(value, group, low=0.1, high=0.9).all()
    assert not episodes.informative_groups(value, group, low=0.1, high=0.89).any()
