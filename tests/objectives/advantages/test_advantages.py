"""Advantages: golden trainers_stat_tracking, and what holds for any rewards."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.objectives.advantages import groups as advantages
from tests.reference.advantages import aggregated_advantages, best_of_group, group_ranks

NAN = float("nan")


def test_golden_columns(golden) -> None:
    """Every column of the file, or a reason in `left_out`."""
    data = golden("trainers_stat_tracking")
    columns = {name: torch.from_numpy(np.array(data[name])).double() for name in data.files}
    group, reward = torch.from_numpy(data["in_group_id"]), columns["in_reward"]
    parts = [reward, columns["in_reward_b"], columns["in_reward_c"]]
    weights = columns["in_weights"].tolist()
    weighted = sum(w * part for w, part in zip(weights, parts, strict=True))
    order = torch.from_numpy(data["in_contiguous_order"])
    everyone = torch.zeros_like(group)
    statistics = advantages.group_statistics(reward, group)

    floor = {"eps": 1e-6, "eps_mode": "floor"}
    sample = {"scale": "group", "eps": 1e-8, "ddof": 1}
    ours: dict[str, tuple[Tensor, float]] = {
        "out_flow_grpo_zero_std_ratio": (torch.tensor(statistics.zero_std_ratio, dtype=torch.float64), 1e-9),
        "out_flow_grpo_reward_std_mean": (torch.tensor(statistics.mean_std), 1e-6),
        "out_dancegrpo_group": (advantages.group_advantages(reward, group, **sample)[order], 1e-3),
        "out_dancegrpo_global": (advantages.group_advantages(reward, everyone, **sample)[order], 1e-3),
    }
    for scale in ("group", "global"):
        plain = advantages.group_advantages(reward, group, scale=scale)
        summed = advantages.group_advantages(weighted, group, scale=scale, **floor)
        ours[f"out_diffusionnft_{scale}"] = plain, 1e-9
        ours[f"out_paco_grpo_{scale}"] = summed, 1e-9
        for peer in ("flow_grpo", "adv_grpo"):
            ours[f"out_{peer}_grpo_{scale}"] = plain, 1e-9
            ours[f"out_{peer}_rwr_{scale}"] = reward, 1e-9
            ours[f"out_{peer}_sft_{scale}"] = best_of_group(reward, group), 1e-9
            pairs = advantages.best_and_worst(reward, group, pair_in_ties=True)
            ours[f"out_{peer}_dpo_{scale}"] = pairs, 1e-9
        for topology in ("group_contiguous", "distributed_k_repeat"):
            ours[f"out_flow_factory_sum_{scale}_{topology}"] = summed, 1e-4
            decoupled = advantages.gdpo_advantages(parts, weights, group)
            ours[f"out_flow_factory_gdpo_{topology}"] = decoupled, 1e-4
    for name in columns:
        if found := re.fullmatch(r"out_mixgrpo_advantage_aggr_trim(\d)", name):
            mixed = aggregated_advantages(parts, weights, group, trim_ratio=int(found[1]) / 10)
            ours[name] = mixed[order], 1e-3

    for name, (value, tolerance) in ours.items():
        want = columns[name] if columns[name].dim() < 2 else columns[name][:, 0]
        assert value.shape == want.shape, name
        # float32 peers: 1e-3 of the value, or 1e-4
        unit = want.abs().clamp(min=0.1 if tolerance == 1e-3 else 1.0)
        assert ((value - want).abs() <= tolerance * unit).all(), name
        if columns[name].dim() == 2:  # the same reward repeated over the timesteps
            assert torch.equal(columns[name], want[:, None].expand_as(columns[name])), name

    # ranks: see test_golden_ranks
    left_out = {"out_paco_rank_grpo_group", "out_paco_rank_grpo_global"}
    assert ours.keys() | left_out == {name for name in columns if name.startswith("out_")}


def possible_ranks(rewards: Tensor) -> list[list[float]]:
    """The ranks from 0 to 1 that each of the rewards of a group may have, whatever the order among equal ones."""
    size = len(rewards)
    low, high = ((rewards[None] < rewards[:, None]).sum(1), (rewards[None] <= rewards[:, None]).sum(1))
    return [[rank / (size - 1) for rank in range(a, b)] for a, b in zip(low.tolist(), high.tolist(), strict=True)]


def test_golden_ranks(golden) -> None:
    """PaCo-RL's rank GRPO ranks ties by an unstable sort, whose order depends on the processor.

    The weighted ranks can be read from the file, as all groups have one mean and one global std; those of samples
    without ties give that std. Each must be a sum of ranks that the samples may have, and each group's of all of them.
    """
    data = golden("trainers_stat_tracking")
    group, weights = torch.from_numpy(data["in_group_id"]), data["in_weights"].tolist()
    parts = [torch.from_numpy(data[name]).double() for name in ("in_reward", "in_reward_b", "in_reward_c")]
    want_group, want_global = (torch.from_numpy(data[f"out_paco_rank_grpo_{name}"]) for name in ("group", "global"))
    possible: list[list[list[float]]] = [[] for _ in group]
    for slot in group.unique():
        members = (group == slot).nonzero()[:, 0]
        for column in zip(members.tolist(), *(possible_ranks(part[members]) for part in parts), strict=True):
            possible[column[0]] = list(column[1:])
    middle = sum(weights) / 2
    alone = [
        n for n, ranks in enumerate(possible) if all(len(own) == 1 for own in ranks) and want_global[n].abs() > 0.1
    ]
    spreads = [
        (sum(w * own[0] for w, own in zip(weights, possible[n], strict=True)) - middle) / float(want_global[n])
        for n in alone
    ]
    assert spreads and max(spreads) - min(spreads) < 1e-9
    found = middle + want_global * spreads[0]
    for n, ranks in enumerate(possible):
        sums = [sum(w * rank for w, rank in zip(weights, chosen, strict=True)) for chosen in itertools.product(*ranks)]
        assert min(abs(float(found[n]) - total) for total in sums) < 1e-9, n
    for slot in group.unique():
        assert found[group == slot].mean() == pytest.approx(middle, abs=1e-9)
    ours = advantages.group_advantages(found, group, scale="group", eps=1e-6, eps_mode="floor")
    assert (ours - want_group).abs().max() < 1e-8


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


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12), st.floats(0.5, 20), st.floats(-50, 50))
def test_a_group_sums_to_zero_and_does_not_see_shift_or_scale(raw: list[float], factor: float, offset: float) -> None:
    values, group = torch.tensor(raw, dtype=torch.float64), torch.zeros(len(raw), dtype=torch.long)
    ours = advantages.group_advantages(values, group, scale="group", eps=0.0)
    if values.std() > 1e-3:
        assert abs(ours.sum().item()) < 1e-8
        again = advantages.group_advantages(values * factor + offset, group, scale="group", eps=0.0)
        assert torch.allclose(ours, again, atol=1e-6)


def test_a_missing_score_changes_nothing_for_the_others() -> None:
    """NaN is left out, not zero: the other samples of the group see a group of three."""
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    rewards = torch.tensor([1.0, 2.0, NAN, 4.0, 0.0, 1.0])
    kept = torch.tensor([0, 1, 3, 4, 5])
    for scale in ("group", "global", "none"):
        ours = advantages.group_advantages(rewards, group, scale=scale)
        assert ours[2] == 0 and ours.isfinite().all()
        assert torch.equal(ours[kept], advantages.group_advantages(rewards[kept], group[kept], scale=scale))


@pytest.mark.parametrize("value", [0.1, -0.1, 0.9, 1e6 + 0.1, 22.0])
@pytest.mark.parametrize("scale", ["group", "global", "none"])
def test_equal_rewards_give_exactly_zero(value: float, scale: str) -> None:
    """Their mean need not be exact in floating point; the advantage is exactly zero all the same."""
    for eps_mode in ("add", "floor"):
        ours = advantages.group_advantages(
            torch.full((7,), value, dtype=torch.float64),
            torch.zeros(7).long(),
            scale=scale,
            eps=1e-8,
            eps_mode=eps_mode,
        )
        assert (ours == 0).all()


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


def test_the_floor_and_the_sum_differ_where_the_spread_is_small() -> None:
    rewards, group = torch.tensor([0.0, 2e-6], dtype=torch.float64), torch.zeros(2).long()
    added = advantages.group_advantages(rewards, group, scale="group", eps=1e-6)
    floored = advantages.group_advantages(rewards, group, scale="group", eps=1e-6, eps_mode="floor")
    assert torch.allclose(added, torch.tensor([-0.5, 0.5], dtype=torch.float64))
    assert torch.allclose(floored, torch.tensor([-1.0, 1.0], dtype=torch.float64))


def test_statistics_count_what_gives_no_update() -> None:
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, NAN, 3.0, 7.0])
    now = advantages.group_statistics(rewards, group)
    assert now.zero_std_ratio == 0.75  # equal scores, one score left, one sample
    assert now.mean_std == pytest.approx(0.5 / 4)
    empty = advantages.group_statistics(torch.tensor([NAN, NAN]), torch.tensor([0, 0]))
    assert empty.zero_std_ratio == 1 and math.isnan(empty.mean_std)


def test_no_score_at_all_gives_no_advantage() -> None:
    for scale in ("group", "global", "none"):
        ours = advantages.group_advantages(torch.full((4,), NAN), torch.tensor([0, 0, 1, 1]), scale=scale)
        assert torch.equal(ours, torch.zeros(4, dtype=torch.float64))


def test_pairs_prefer_nothing_among_equals() -> None:
    group = torch.tensor([0, 0, 0, 1, 1, 2])
    rewards = torch.tensor([0.5, 0.5, 0.5, 1.0, NAN, 3.0])
    assert (advantages.best_and_worst(rewards, group) == 0).all()
    assert advantages.best_and_worst(rewards, group, pair_in_ties=True).tolist() == [-1, 1, 0, 0, 0, 0]


def test_rewards_may_be_negative() -> None:
    group, rewards = torch.tensor([0, 0, 1, 1]), torch.tensor([-3.0, -1.0, -2.0, -2.0])
    assert advantages.best_and_worst(rewards, group).tolist() == [-1, 1, 0, 0]
    assert advantages.group_statistics(rewards, group).zero_std_ratio == 0.5


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


def test_decoupled_normalisation_tells_apart_what_the_sum_does_not() -> None:
    """Rewards (1, 0) and (0, 1) with unequal spreads: the same weighted sum, different advantages."""
    one, other = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    group = torch.zeros(4).long()
    decoupled = advantages.gdpo_advantages([one, other], [1.0, 1.0], group)
    summed = advantages.group_advantages(one + other, group, scale="group")
    assert summed[0] == summed[1] and decoupled[0] > decoupled[1] + 0.1


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


def test_ranks_with_ties_are_those_of_the_reward_golden(golden) -> None:
    data = golden("rewards_clip_family")
    scores = torch.from_numpy(data["rank_in"])
    group = torch.zeros(len(scores), dtype=torch.int64)
    np.testing.assert_allclose(group_ranks(scores, group), data["rank_mean_ties"], rtol=0, atol=1e-9)
    # the released code ranks ties by position, and divides by n where ours divides by n - 1
    released = group_ranks(scores, group, ties_by_position=True) * (len(scores) - 1) / len(scores)
    np.testing.assert_allclose(released, data["rank_flow_factory"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "global", "none"])
def test_no_spread_is_zero_also_without_an_epsilon(scale: advantages.Scale) -> None:
    rewards, group = torch.tensor([0.1, 0.1, NAN, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    plain = advantages.group_advantages(rewards, group, scale=scale, eps=0.0)
    assert plain[:3].tolist() == [0.0] * 3 and plain[3] == -plain[4] < 0
    assert advantages.group_advantages(rewards[:3], group[:3], scale=scale, eps=0.0).tolist() == [0.0] * 3


def test_a_sample_at_the_mean_of_its_group_is_learnt_from() -> None:
    rewards, group = torch.tensor([0.0, 0.5, 1.0, NAN, 0.7, 0.7, 0.2]), torch.tensor([0, 0, 0, 0, 1, 1, 2])
    assert advantages.group_advantages(rewards, group, scale="group")[1] == 0
    assert advantages.informative(rewards, group).tolist() == [True] * 3 + [False] * 4
