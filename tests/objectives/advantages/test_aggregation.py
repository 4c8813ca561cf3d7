"""Several rewards to one: golden trainers_paco_log_tame, and properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.objectives.advantages import aggregation
from genrl.objectives.advantages import groups as advantages
from tests.reference.advantages import sum_of_advantages

NAN = float("nan")


def test_golden_columns(golden) -> None:
    data = golden("trainers_paco_log_tame")
    columns = {name: torch.from_numpy(data[name]) for name in data.files if name != "in_reward_names"}
    rewards, weights, group = list(columns["in_rewards"]), columns["in_weights"].tolist(), columns["in_group_id"]
    floor = {"eps": 1e-6, "eps_mode": "floor"}
    weighted = sum(w * reward for w, reward in zip(weights, rewards, strict=True))
    released = aggregation.log_tame_advantages(rewards, weights, group, variant="released")
    ours = {
        "out_cv": torch.tensor([aggregation.coefficient_of_variation(r) for r in rewards], dtype=torch.float64),
        "out_geometric_mean": torch.stack(rewards).log().mean(0).exp(),
        "out_harmonic_mean": 1 / torch.stack(rewards).reciprocal().mean(0),
        "out_tracker_with_log_tame_fn": released,
        "out_released_default_weighted_sum_global": advantages.group_advantages(
            weighted, group, scale="global", **floor
        ),
    }
    for scale in ("group", "global"):
        ours[f"out_weighted_advantage_sum_{scale}"] = sum_of_advantages(rewards, weights, group, scale=scale)
        ours[f"out_log_tame_mean_then_grpo_{scale}"] = aggregation.log_tame_advantages(
            rewards, weights, group, scale=scale
        )
    for name in columns:
        if name.startswith("out_log_tame_") and name not in ours:
            given_threshold = name.removeprefix("out_log_tame_").replace("p", ".")
            threshold = given_threshold if given_threshold in ("mean", "median") else float(given_threshold)
            ours[name] = aggregation.log_tame(rewards, weights, threshold=threshold)
    for name, value in ours.items():
        assert ((value - columns[name]).abs() <= 1e-9 * columns[name].abs().clamp(min=1)).all(), name
    assert ours.keys() == {name for name in columns if name.startswith("out_")}


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


def test_one_reward_is_never_tamed_by_the_mean() -> None:
    reward = torch.tensor([0.0, 5.0, 100.0], dtype=torch.float64)
    assert torch.equal(aggregation.log_tame([reward], [1.0]), reward)


def test_as_the_paper_has_it_groups_are_centred_and_as_released_they_are_not() -> None:
    group = torch.tensor([0, 0, 1, 1])
    rewards = [torch.tensor([0.1, 0.9, 0.2, 0.3]), torch.tensor([3.0, 4.0, 3.5, 3.0])]
    paper = aggregation.log_tame_advantages(rewards, [1.0, 1.0], group)
    released = aggregation.log_tame_advantages(rewards, [1.0, 1.0], group, variant="released")
    assert paper[:2].sum().abs() < 1e-9 and paper[2:].sum().abs() < 1e-9
    assert (released > 0).all() and torch.equal(released, aggregation.log_tame(rewards, [1.0, 1.0]))


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
