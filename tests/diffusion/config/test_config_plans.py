"""What is accepted has a plan for every iteration; how often which comes; who waits, and what mends it."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from genrl.config import load
from genrl.diffusion.config.combinations import even, most_processes, processes_problem, remedy, waiting
from genrl.diffusion.steps.plans import Steps
from genrl.diffusion.steps.settings import PolicyGradient
from tests.cli.commands import run, words
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
    optional={"depths": st.lists(st.integers(1, 6), min_size=1, max_size=2), "slide_every": st.integers(1, 9)}
    | {"width": st.sampled_from(["best_sibling", "extremes"])},
)
PLACES = st.sampled_from(["window", "window_start"]) | st.lists(st.integers(0, 6), min_size=1, max_size=3)
trees = st.fixed_dictionaries(
    {"ways": st.integers(2, 3), "at": PLACES},
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
        "tree": trees.map(lambda tree: {"ways": tree["ways"], "at": tree["at"]}),
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
        if plan.splits:
            assert 3 * plan.roots >= most_processes(accepted) * trains.updates >= trains.updates
        if trains.algorithm == "dynamic_tree_rpo":
            assert plan.roots == 1
        assert plan in {p for p, _ in known}
    assert math.isclose(sum(r.share for r in rounds), 1.0)


@pytest.mark.parametrize("schedule", ["progressive", "backward"])
def test_shares_of_a_window_that_is_not_drawn_are_those_of_the_run(schedule: str) -> None:
    window = {"size": 3, "schedule": schedule} | ({"shortest": 1} if schedule == "backward" else {"every": 7})
    result = config({"window": window}, iterations=37)
    ran = Counter(Steps.of(result, result.trainer, i).trained for i in range(37))
    shares = {r.trained: r.share for r in result.trainer.rounds(result)}
    assert shares == pytest.approx({steps: count / 37 for steps, count in ran.items()})
    assert len(ran) > 1 and result.trainer.rounds(result)[0].first == 0


def test_updates_and_processes_share_trees() -> None:
    tree = {"tree": {"ways": 2, "at": [0, 1, 2]}, "updates_per_iteration": 2}
    result = config(tree, group_size=16, prompts_per_iteration=5, batch_size=80)  # 10 trees
    assert most_processes(result) == 5
    assert [result.trainer.cut(result, count)[0] for count in (1, 2, 3, 5)] == [[5], [3, 2], [2, 2, 1], [1] * 5]
    chain = config({"updates_per_iteration": 2}, batch_size=6)
    assert most_processes(chain) == 12 and chain.trainer.cut(chain, 5) == [[3, 3, 2, 2, 2]] * 2


ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "configs" / "flow_grpo.yaml"
UNEVEN = "sampling.prompts_per_iteration=3"
"""36 samples in 2 micro-batches."""


def test_who_would_have_nothing_to_do_and_who_waits_is_said_with_what_ends_it() -> None:
    for context, count, says in (
        (1, 36, None),
        (1, 37, "micro-batches for 36 only; start no more, or write sampling.prompts_per_iteration=37"),
        (2, 72, None),
        (2, 3, "cannot be put in groups of 2"),
        (2, 74, "37 groups of 2 processes, but an optimiser step has micro-batches for 36 only"),
    ):
        result = processes_problem(load(FILE, [UNEVEN, f"distributed.context={context}"]), count)
        assert result is says is None or says in str(result), count
    text = waiting(load(FILE, [UNEVEN]), 8)
    assert "8 micro-batches of 5 samples" in str(text) and "about 7.20 times as fast as one;" in str(text)
    assert "; with sampling.prompts_per_iteration=8 none does" in str(text)
    for count in (1, 2, 3, 4, 6, 9):
        assert waiting(load(FILE, [UNEVEN]), count) is None


@pytest.mark.parametrize("count", [3, 4, 5])
@pytest.mark.parametrize("name", ["flow_grpo", "quickstart", "diffusion/dpo", "diffusion/tree_grpo", "diffusion/crd"])
def test_the_remedy_gives_equal_work(name: str, count: int) -> None:
    """A configuration that is taken, with updates, pairs and trees."""
    file = ROOT / "configs" / f"{name}.yaml"
    shipped = load(file)
    mended = load(file, [] if count in even(shipped) else remedy(shipped, count).split())
    steps = mended.trainer.cut(mended, count)
    assert len(steps) == mended.trainer.updates
    for sizes in steps:
        assert len({sum(sizes[process::count]) for process in range(count)}) == 1
    assert waiting(mended, count) is None


def test_updates_are_shared_out_one_by_one() -> None:
    """4 micro-batches in 2 updates: 5 processes share out each one's 48 samples."""
    config = load(FILE, ["trainer.updates_per_iteration=2"])
    assert config.trainer.cut(config, 5) == [[10, 10, 10, 9, 9]] * 2 and waiting(config, 5) is None
    assert "equal work for 1, 2, 3, 4, 6, 8, 12, 16, ... processes" in words(run("check", str(FILE)))
    trees = load(ROOT / "configs" / "diffusion" / "branch_grpo.yaml")  # 6: of 4 processes two have 2 trees
    assert list(even(trees)) == [1, 2, 3, 6]
    assert "4 micro-batches of 2 trees" in str(waiting(trees, 4)) and "about 3.00 times" in str(waiting(trees, 4))
