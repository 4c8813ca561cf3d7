"""Several rewards to one: golden trainers_paco_log_tame, and properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.diffusion.methods.paco_grpo import train as aggregation
from genrl.objectives.advantages import groups as advantages
from tests.golden_cases import Arrays

NAN = float("nan")


def test_golden_columns(golden) -> None:
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
