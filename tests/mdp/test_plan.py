"""Sampling plans: refusals, and the text of `genrl plan`. Golden trees (objectives/advantages) have what they count."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.diffusion.methods.draft import train as truncation
from genrl.diffusion.methods.talk2move import train as early_exit
from genrl.mdp import levels
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
from tests.golden_cases import Arrays
from tests.reference.grids import shifted_grid


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
    code = "import sys, genrl.mdp.plan, genrl.mdp.plan; assert 'torch' not in sys.modules"
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


# -- Talk2Move's steps: golden talk2move_rewards (its exit step and call counts; the rewards are tested with theirs)


NAN = float("nan")


def test_golden_exit_step_and_calls(golden) -> None:
    a = Arrays(golden("talk2move_rewards"))
    rewards = a.given("exit_rewards_prompt_step_sample")
    a.check("exit_variance_per_step", early_exit.exit_variance(rewards))
    a.check("exit_step", early_exit.exit_step(rewards))
    for length, exit_step, shortcut, calls in a.given("active_T_K_shortcut_nfe").tolist():
        assert exit_step + shortcut == calls
        grid = levels.linspace_grid(length)
        assert len(early_exit.shortcut_sigmas(grid, exit_step, shortcut)) - 1 == calls - exit_step
    a.all_used("(exit|active)_.*")


def test_missing_scores_are_left_out() -> None:
    rewards = torch.tensor([[[1.0, 3.0, NAN], [5.0, NAN, NAN]], [[NAN, NAN, NAN], [2.0, 2.0, 2.0]]])
    assert early_exit.exit_variance(rewards).tolist() == [1.0, 0.0]
    assert early_exit.exit_step(torch.full((1, 3, 2), NAN)) == 0


def test_the_shortcut_goes_evenly_to_no_noise() -> None:
    grid = shifted_grid(10, 3.0)
    path = early_exit.shortcut_sigmas(grid, 4, 2)
    assert path[0] == grid[4] and path[-1] == 0 and torch.allclose(path.diff(), -grid[4] / 2)


def test_impossible_exits_are_refused() -> None:
    grid = levels.linspace_grid(10)
    for exit_step in (0, 11):
        with pytest.raises(ValueError, match="must be in 1 .. 10"):
            early_exit.shortcut_sigmas(grid, exit_step, 2)
    with pytest.raises(ValueError, match="at least one step, got 0"):
        early_exit.shortcut_sigmas(grid, 4, 0)
    with pytest.raises(ValueError, match="no shortcut, got 2"):
        early_exit.shortcut_sigmas(grid, 10, 2)
    with pytest.raises(ValueError, match=r"\[prompts, exit steps, samples\]"):
        early_exit.exit_variance(torch.zeros(3, 4))


# -- Which steps a reward's gradient reaches


@given(st.integers(1, 40), st.data())
def test_truncated_steps_end_with_the_last(num_steps: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, num_steps))
    assert list(truncation.last_steps(num_steps, k)) == list(range(num_steps))[-k:]
    high = data.draw(st.integers(k, num_steps))
    update = data.draw(st.integers(0, 99))
    drawn = truncation.random_truncation(num_steps, low=k, high=high, seed=3, update=update)
    assert drawn.stop == num_steps and k <= len(drawn) <= high
    assert drawn == truncation.random_truncation(num_steps, low=k, high=high, seed=3, update=update)


def test_lengths_and_steps_are_drawn_evenly() -> None:
    lengths = torch.tensor([len(truncation.random_truncation(5, seed=1, update=u)) for u in range(2000)])
    assert (torch.bincount(lengths, minlength=6)[1:] - 400).abs().max() < 5 * 18
    steps = torch.tensor([truncation.random_late_step(10, low=6, seed=1, update=u) for u in range(2000)])
    counts = torch.bincount(steps, minlength=10)
    assert counts[:6].sum() == 0 and (counts[6:] - 500).abs().max() < 5 * 20
    assert {truncation.random_late_step(10, low=6, high=7, seed=s, update=0) for s in range(9)} == {6}


def test_ranges_that_do_not_exist_are_refused() -> None:
    for k in (0, 6):
        with pytest.raises(ValueError, match="1 to 5 of 5 steps"):
            truncation.last_steps(5, k)
    with pytest.raises(ValueError, match="chosen from 1 .. 5, got 3 .. 2"):
        truncation.random_truncation(5, low=3, high=2, seed=0, update=0)
    with pytest.raises(ValueError, match="chosen from 0 .. 4, got 5 .. 4"):
        truncation.random_late_step(5, low=5, seed=0, update=0)
