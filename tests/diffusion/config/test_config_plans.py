"""What is accepted can be sampled: a plan for every iteration, and how often which plan comes."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from genrl.diffusion.config.combinations import most_processes
from genrl.diffusion.steps.layout import roots_together
from genrl.diffusion.steps.plans import Steps
from genrl.diffusion.steps.settings import PolicyGradient
from genrl.mdp.plan import unpruned_steps
from tests.diffusion import runs


def config(trainer: dict[str, Any], *, steps: int = 10, iterations: int = 40, **sampling: Any) -> Any:
    chosen = {"num_inference_steps": steps, "prompts_per_iteration": 3, "batch_size": 4, **sampling}
    return runs.unloaded(sampling=chosen, trainer={"algorithm": "flow_grpo", **trainer}, iterations=iterations)


windows = st.fixed_dictionaries(
    {"size": st.integers(1, 4), "schedule": st.sampled_from(["random", "progressive", "geometric"])},
    optional={"low": st.integers(0, 3), "high": st.integers(3, 7)},
)
backward = st.fixed_dictionaries(
    {"size": st.integers(1, 5), "schedule": st.just("backward")},
    optional={"shortest": st.integers(1, 5), "high": st.integers(3, 7)},
)
prunes = st.fixed_dictionaries(
    {},
    optional={
        "depths": st.lists(st.integers(1, 6), min_size=1, max_size=2),
        "slide_every": st.integers(1, 9),
        "width": st.sampled_from(["best_sibling", "extremes"]),
    },
)
trees = st.fixed_dictionaries(
    {
        "ways": st.integers(2, 3),
        "at": st.sampled_from(["window", "window_start"]) | st.lists(st.integers(0, 6), min_size=1, max_size=3),
    },
    optional={"spread": st.just(4.0), "normalise": st.just("depth"), "prune": prunes, "contrast": st.just(True)},
)
trainers = st.fixed_dictionaries(
    {},
    optional={
        "window": windows | backward,
        "tree": trees,
        "tail_ratio": st.sampled_from([0.3, 1.0]),
        "noise_outside_window": st.booleans(),
        "kernel": st.sampled_from(["flow_sde", "flow_cps"]),
        "updates_per_iteration": st.integers(1, 4),
    },
)
growing = st.fixed_dictionaries(
    {
        "algorithm": st.just("dynamic_tree_rpo"),
        "tree": st.fixed_dictionaries(
            {"ways": st.integers(2, 3), "at": st.just("window") | st.lists(st.integers(0, 6), min_size=1, max_size=3)},
        ),
    },
    optional={"window": windows | backward, "kernel": st.sampled_from(["flow_sde", "flow_cps"])},
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(trainer=trainers | growing, group=st.sampled_from([2, 4, 8, 9, 18, 27]), iterations=st.integers(1, 30))
def test_every_iteration_of_what_is_accepted_has_a_plan(trainer: dict[str, Any], group: int, iterations: int) -> None:
    try:
        accepted = config(trainer, steps=8, iterations=iterations, group_size=group)
    except ValidationError:
        assume(False)
        return
    trains, chosen = accepted.trainer, []
    assert isinstance(trains, PolicyGradient)
    rounds = trains.rounds(accepted)
    known = {(r.plan, r.trained) for r in rounds}
    for iteration in range(iterations):
        plan, trained, _, window = Steps.of(accepted, trains, iteration)
        assert window is None or 0 <= window[0] <= window[-1] <= 6
        assert plan.leaves == group and set(trained) <= set(plan.stochastic) and trained
        assert 7 not in plan.stochastic
        chosen.append(plan)
        together = roots_together(accepted, plan, 1)
        assert 1 <= together <= accepted.sampling.batch_size
        if plan.splits:
            pieces = math.ceil(3 * plan.roots / together)
            assert pieces >= trains.updates  # no update without a micro-batch
            assert 3 * plan.roots >= most_processes(accepted) * trains.updates >= trains.updates
        if trains.algorithm == "dynamic_tree_rpo":
            assert plan.roots == 1
        assert plan in {p for p, _ in known}
    assert math.isclose(sum(r.share for r in rounds), 1.0)


@pytest.mark.parametrize("schedule", ["progressive", "backward"])
def test_shares_of_a_window_that_is_not_drawn_are_those_of_the_run(schedule: str) -> None:
    window = {"size": 3, "schedule": schedule} | ({"shortest": 1} if schedule == "backward" else {"every": 7})
    found = config({"window": window}, iterations=37)
    ran = Counter(Steps.of(found, found.trainer, i).trained for i in range(37))
    shares = {r.trained: r.share for r in found.trainer.rounds(found)}
    assert shares == pytest.approx({steps: count / 37 for steps, count in ran.items()})
    assert len(ran) > 1 and found.trainer.rounds(found)[0].first == 0


@pytest.mark.parametrize(("schedule", "ratio"), [("random", 1.0), ("geometric", 0.5)])
def test_shares_of_a_window_that_is_drawn_are_those_of_its_law(schedule: str, ratio: float) -> None:
    found = config({"window": {"size": 3, "schedule": schedule, "low": 1, "high": 6}}, iterations=2000)
    law = [ratio**k for k in range(3)]
    shares = {r.trained: r.share for r in found.trainer.rounds(found)}
    assert shares == pytest.approx({(1 + k, 2 + k, 3 + k): share / sum(law) for k, share in enumerate(law)})
    ran = Counter(Steps.of(found, found.trainer, i).trained for i in range(2000))
    assert all(abs(ran[steps] - 2000 * p) < 5 * math.sqrt(2000 * p * (1 - p)) for steps, p in shares.items())


def test_pruned_depths_slide() -> None:
    """BranchGRPO's window of depths moves up by one every 10 iterations, as far as the last split."""
    found = config({"tree": {"ways": 2, "at": [0, 3], "prune": {"depths": [8, 9], "slide_every": 10}}}, iterations=20)
    shares = {r.trained: r.share for r in found.trainer.rounds(found)}
    assert shares == pytest.approx({unpruned_steps(range(9), depths): 0.5 for depths in ((8, 9), (7, 8))})


def test_updates_and_processes_share_trees() -> None:
    tree = {"tree": {"ways": 2, "at": [0, 1, 2]}, "updates_per_iteration": 2}
    found = config(tree, group_size=16, prompts_per_iteration=5, batch_size=80)  # 10 trees
    assert most_processes(found) == 5
    plan = Steps.of(found, found.trainer, 0).plan
    assert [roots_together(found, plan, processes) for processes in (1, 2, 3, 5)] == [5, 3, 2, 1]
    chain = config({"updates_per_iteration": 2}, batch_size=6)
    assert most_processes(chain) == 2
