"""Sampling plans: refusals, and the text of `genrl plan`. Golden trees (objectives/advantages) have what they count."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genrl.mdp.plan import (
    SamplingPlan,
    Tail,
    caterpillar,
    compress_tail,
    describe,
    make_plan,
    sliding_depths,
    unpruned_steps,
)


def noise(steps: int) -> dict[int, float]:
    return {step: 0.7 for step in range(steps)}


@st.composite
def plans(draw: st.DrawFn) -> SamplingPlan:
    steps = draw(st.integers(1, 5))
    branching = tuple(draw(st.lists(st.integers(1, 3), min_size=steps, max_size=steps)))
    free = [draw(st.booleans()) for _ in range(steps)]
    levels = tuple(0.7 if ways > 1 or on else None for ways, on in zip(branching, free, strict=True))
    return SamplingPlan(
        roots=draw(st.integers(1, 3)),
        branching=branching,
        noise_levels=levels,
        continue_one=draw(st.booleans()),
    )


def test_a_compressed_tail_keeps_the_window_and_what_it_is_compared_with() -> None:
    plan = make_plan(10, noise={2: 0.7, 3: 0.7}, splits={2: 4})
    short = compress_tail(plan, 0.7)  # 6 x 0.7 = 4.2, rounded up
    assert short.steps == 9 and short.tail == Tail(5, 6) and short.stochastic == (2, 3) and short.splits == (2,)
    assert short.independent_calls == plan.independent_calls == 40 and short.full_steps == 10
    assert compress_tail(make_plan(13, noise=noise(3)), 0.7).tail == Tail(7, 10)  # 10 x 0.7 exceeds 7 by an ulp


def test_what_cannot_be_is_refused_by_the_name_of_the_field() -> None:
    ok = {"roots": 1, "branching": (2, 1), "noise_levels": (0.7, None)}
    assert SamplingPlan(**ok).leaves == 2
    wrong = {
        "roots: a plan without": {"roots": 0},
        "branching: a plan needs": {"branching": (), "noise_levels": ()},
        "noise_levels: 1 levels for the 2 steps": {"noise_levels": (0.7,)},
        "branching: step 1 has 0": {"branching": (2, 0)},
        "branching: step 1 branches 2 ways but is deterministic": {"branching": (2, 2)},
        "noise_levels: step 0 has -1": {"noise_levels": (-1.0, None)},
        "noise_levels: step 0 has nan": {"noise_levels": (float("nan"), None)},
        "spread: must be above 0": {"spread": 0.0},
        "tail: 3 of 2 steps": {"tail": Tail(3, 4)},
        "tail: the steps of the solver are deterministic": {"tail": Tail(2, 4)},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            SamplingPlan(**(ok | change))
    with pytest.raises(ValueError, match=r"noise: steps \[9\] are outside the schedule's 0 .. 4"):
        make_plan(5, noise={9: 0.7})
    with pytest.raises(ValueError, match=r"splits: steps \[-1\]"):
        make_plan(5, noise={0: 0.7}, splits={-1: 2})
    with pytest.raises(ValueError, match="ratio: .* above 0"):
        compress_tail(SamplingPlan(**ok), 0.0)
    with pytest.raises(ValueError, match="no tail to compress"):
        compress_tail(make_plan(3, noise=noise(3)), 0.5)
    with pytest.raises(ValueError, match=r"steps \[1, 7\] are deterministic or outside"):
        SamplingPlan(**ok).trained_edges({0, 1, 7})


def test_pruning_that_leaves_nothing_is_refused_before_anything_is_run() -> None:
    assert unpruned_steps(range(20), range(15, 20)) == (*range(14), 19)
    with pytest.raises(ValueError, match="depths: pruning the edges into depths"):
        unpruned_steps((3, 4), (4, 5))


def test_the_text_has_the_numbers_of_the_plan() -> None:
    plan = make_plan(20, noise=noise(19), splits=dict.fromkeys((0, 3, 6, 9), 2), spread=4.0)
    text = describe(plan, plan.stochastic, calls_per_state=2)
    lines = text.splitlines()
    assert lines[0] == "per prompt: 1 root, 16 leaves, 219 nodes, 218 edges"
    assert lines[2].split() == ["0", "1", "2", "0.7", "2", "2"]
    assert lines[-4].split() == ["19", "16", "1", "none", "16", "0"]
    assert "correlation 0.0588" in text
    assert "in sampling: 406, 25.38 per image; independent rollouts with as many leaves: 640, ratio 0.634" in text
    assert "in training: 374, 23.38 per image, for 202 edges" in text
    table = [line.split() for line in lines[2:-3]]
    assert sum(int(row[4]) for row in table) == plan.edges
    assert sum(int(row[5]) for row in table) == plan.trained_edges(plan.stochastic)

    flash = compress_tail(make_plan(25, noise=noise(4), roots=12), 0.4)
    text = describe(flash, range(4))
    assert "4-12      12     1     solver" in text and "the last 9 steps in place of 21 of the schedule's" in text
    assert "ratio 0.520" in text
    assert "3 (one goes on)" in describe(caterpillar(6, noise=noise(6), first=2, candidates=3), range(2, 6))


def test_planning_needs_no_torch() -> None:
    code = "import sys, genrl.mdp.plan, genrl.mdp.windows; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.integers(0, 400), st.integers(1, 40), st.integers(0, 15))
def test_sliding_depths_keep_their_number_and_stop(iteration: int, interval: int, stop: int) -> None:
    window = sliding_depths(range(15, 20), iteration=iteration, interval=interval, stop=stop)
    assert len(window) == 5 and stop <= window.start <= 15
    assert window.start == max(stop, 15 - iteration // interval)


@pytest.mark.parametrize("base", [(), (3, 5)])
def test_depths_with_gaps_do_not_slide(base: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="consecutive depths"):
        sliding_depths(base, iteration=0, interval=1, stop=0)
