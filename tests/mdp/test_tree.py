"""The tree's arrays and random numbers: branching 1 is independent rollouts, siblings differ, a leaf stands alone."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.diffusion.methods.draft import train as truncation
from genrl.diffusion.methods.talk2move import train as early_exit
from genrl.mdp.levels import linspace_grid
from genrl.mdp.noise import derive_seed, keyed_noise
from genrl.mdp.plan import SamplingPlan, Tail, caterpillar, compress_tail, make_plan, sliding_depths, unpruned_steps
from genrl.mdp.tree import Tree, edge_noise, from_parents, grow
from tests.golden_cases import Arrays
from tests.reference.grids import shifted_grid

KEY = (5, 2)  # run seed, iteration
SHAPE = (3,)


@st.composite
def plans(draw: st.DrawFn) -> SamplingPlan:
    steps = draw(st.integers(1, 5))
    branching = tuple(draw(st.lists(st.integers(1, 3), min_size=steps, max_size=steps)))
    free = [draw(st.booleans()) for _ in range(steps)]
    levels = tuple(0.7 if ways > 1 or on else None for ways, on in zip(branching, free, strict=True))
    roots, one = draw(st.integers(1, 3)), draw(st.booleans())
    return SamplingPlan(roots=roots, branching=branching, noise_levels=levels, continue_one=one)


@given(plans())
def test_segments_cover_every_edge_once_and_cost_what_the_plan_says(plan: SamplingPlan) -> None:
    tree = grow(plan, *KEY)
    segments = tree.segments()
    assert [segment.start for segment in segments] == [0, *(segment.stop for segment in segments[:-1])]
    assert segments[-1].stop == plan.steps
    assert sum((s.stop - s.start) * len(s.rows) for s in segments) == plan.calls
    sampled = []
    for segment in segments:
        for depth in range(segment.start + 1, segment.stop):  # no branching inside: one node per row
            sampled += tree.level(depth)
            before = tree.level(depth - 1)
            assert tree.parent[list(tree.level(depth))].tolist() == list(before)
            assert torch.equal(tree.first_leaf[list(tree.level(depth))], tree.first_leaf[segment.rows])
        sampled += segment.children.tolist()
        above = torch.tensor(list(tree.level(segment.stop - 1)))
        assert torch.equal(above[segment.parent_row], tree.parent[segment.children])
    assert sorted(sampled) == list(range(plan.roots, tree.num_nodes))


def policy(x: Tensor, step: int) -> Tensor:
    return torch.tanh(x) * (0.5 + step) - 0.1 * x


def independent(slot: int, steps: int, initial: tuple[int | str, ...] | None = None) -> list[Tensor]:
    """A rollout as `Policy.roll_out` draws it: initial noise and steps keyed by (seed, iteration, slot)."""
    key = (*KEY, slot)
    start = torch.Generator().manual_seed(derive_seed(*(initial or key), "initial"))
    states = [torch.randn(SHAPE, generator=start).double()]
    for step in range(steps):
        states.append(policy(states[-1], step) + keyed_noise(SHAPE, *key, "step", step))
    return states


def run(tree: Tree, initial: tuple[int | str, ...] | None = None, spread: float | None = None) -> dict[int, Tensor]:
    """All states of the tree, segment by segment, with the tree's own keys."""
    keys = tree.keys(range(tree.num_nodes), seed=KEY[0], iteration=KEY[1])
    states = {}
    for root in tree.level(0):
        start = torch.Generator().manual_seed(derive_seed(*(initial or keys[root]), "initial"))
        states[root] = torch.randn(SHAPE, generator=start).double()
    for segment in tree.segments():
        for step in range(segment.start, segment.stop):
            for node in tree.level(step):
                mean = policy(states[node], step)  # one call, whatever the number of children
                for child in tree.children(node):
                    split = len(tree.children(node)) > 1
                    own = spread if split else None
                    noise = edge_noise(SHAPE, keys[child], step, parent_key=keys[node], spread=own)
                    states[child] = mean + noise
    return states


@given(st.integers(1, 5), st.integers(1, 5))
def test_branching_1_is_independent_rollouts_bit_for_bit(roots: int, steps: int) -> None:
    tree = grow(make_plan(steps, noise=dict.fromkeys(range(steps), 0.7), roots=roots))
    states = run(tree)
    for slot, leaf in enumerate(tree.leaves.tolist()):
        want = independent(slot, steps)
        assert all(torch.equal(states[node], state) for node, state in zip(tree.path(leaf), want, strict=True))


@given(plans())
def test_the_first_leaf_is_rollout_0_and_every_leaf_can_be_made_alone(plan: SamplingPlan) -> None:
    tree = grow(plan, *KEY)
    states = run(tree)
    keys = tree.keys(range(tree.num_nodes), seed=KEY[0], iteration=KEY[1])
    if not plan.continue_one:
        assert torch.equal(states[tree.leaves[0].item()], independent(0, plan.steps)[-1])
    for leaf in tree.leaves.tolist():
        path = tree.path(leaf)
        x = states[path[0]]
        for step, node in enumerate(path[1:]):
            x = policy(x, step) + edge_noise(SHAPE, keys[node], step)
        assert torch.equal(x, states[leaf])


@given(plans())
def test_no_two_edges_share_their_noise(plan: SamplingPlan) -> None:
    tree = grow(plan, *KEY)
    keys = tree.keys(range(plan.roots, tree.num_nodes), seed=0, iteration=0)
    edges = [(*key, step) for key, step in zip(keys, (tree.depth[plan.roots :] - 1).tolist(), strict=True)]
    assert len(set(edges)) == len(edges)
    other = tree.keys(range(tree.num_nodes), seed=0, iteration=0, prompt_slot=1)
    assert not set(keys) & set(other)


def test_who_goes_on_in_a_caterpillar_depends_on_the_key_alone() -> None:
    plan = caterpillar(12, noise=dict.fromkeys(range(12), 1.0), first=2, candidates=4)
    trees = [grow(plan, 0, iteration, 0) for iteration in range(6)]
    assert torch.equal(trees[0].parent, grow(plan, 0, 0, 0).parent)
    assert len({tuple(tree.parent.tolist()) for tree in trees}) == 6
    chosen = torch.cat([tree.parent[tree.parent > 2] for tree in (grow(plan, 1, i, 0) for i in range(300))])
    place = (chosen - 3) % 4
    counts = torch.bincount(place[::4], minlength=4)  # 300 x 9 choices of one in four
    assert counts.sum() == 2700 and (counts - 675).abs().max() < 5 * 22.5


def test_correlated_siblings_share_the_part_of_their_parent() -> None:
    tree = grow(make_plan(2, noise={0: 0.7, 1: 0.7}, splits={1: 2}, spread=2.0))
    plain, related = run(tree), run(tree, spread=2.0)
    first, second = tree.leaves.tolist()
    difference = (related[first] - related[second]) / (plain[first] - plain[second])
    assert torch.allclose(difference, torch.full(SHAPE, 2.0 / 5.0**0.5, dtype=torch.float64), atol=1e-6)
    assert not torch.equal(related[first], related[second])
    with pytest.raises(ValueError, match="parent_key"):
        edge_noise(SHAPE, (0, 0, 0), 1, spread=2.0)


@pytest.mark.parametrize("parent", [[], [0], [-1, 0, 1, 0], [-1, 2, 1], [-1, 0, -1], [-1, 1]])
def test_nodes_out_of_level_order_are_refused(parent: list[int]) -> None:
    with pytest.raises(ValueError, match="root|level order"):
        from_parents(torch.tensor(parent, dtype=torch.int64))


# -- Sampling plans: refusals. Their text: tests/cli/test_check.py; golden trees (objectives/advantages) have the counts
def levels(steps: int) -> dict[int, float]:
    return {step: 0.7 for step in range(steps)}


def test_a_compressed_tail_keeps_the_window_and_what_it_is_compared_with() -> None:
    plan = make_plan(10, noise={2: 0.7, 3: 0.7}, splits={2: 4})
    short = compress_tail(plan, 0.7)  # 6 x 0.7 = 4.2, rounded up
    assert short.steps == 9 and short.tail == Tail(5, 6) and short.stochastic == (2, 3) and short.splits == (2,)
    assert short.independent_calls == plan.independent_calls == 40 and short.full_steps == 10
    assert compress_tail(make_plan(13, noise=levels(3)), 0.7).tail == Tail(7, 10)  # 10 x 0.7 exceeds 7 by an ulp


def test_what_cannot_be_is_refused_by_the_name_of_the_field() -> None:
    ok = {"roots": 1, "branching": (2, 1), "noise_levels": (0.7, None)}
    assert SamplingPlan(**ok).leaves == 2
    for message, change in {
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
    }.items():
        with pytest.raises(ValueError, match=message):
            SamplingPlan(**(ok | change))
    assert unpruned_steps(range(20), range(15, 20)) == (*range(14), 19)
    for call, message in (
        (lambda: make_plan(5, noise={9: 0.7}), r"noise: steps \[9\] are outside the schedule's 0 .. 4"),
        (lambda: make_plan(5, noise={0: 0.7}, splits={-1: 2}), r"splits: steps \[-1\]"),
        (lambda: compress_tail(SamplingPlan(**ok), 0.0), "ratio: .* above 0"),
        (lambda: compress_tail(make_plan(3, noise=levels(3)), 0.5), "no tail to compress"),
        (lambda: SamplingPlan(**ok).trained_edges({0, 1, 7}), r"steps \[1, 7\] are deterministic or outside"),
        (lambda: unpruned_steps((3, 4), (4, 5)), "depths: pruning the edges into depths"),
        (lambda: sliding_depths((3, 5), iteration=0, interval=1, stop=0), "consecutive depths"),
        (lambda: early_exit.shortcut_sigmas(linspace_grid(10), 0, 2), "must be in 1 .. 10"),
        (lambda: early_exit.shortcut_sigmas(linspace_grid(10), 4, 0), "at least one step, got 0"),
        (lambda: early_exit.shortcut_sigmas(linspace_grid(10), 10, 2), "no shortcut, got 2"),
        (lambda: early_exit.exit_variance(torch.zeros(3, 4)), r"\[prompts, exit steps, samples\]"),
        (lambda: truncation.last_steps(5, 0), "1 to 5 of 5 steps"),
        (lambda: truncation.random_truncation(5, high=6, seed=0, update=0), "chosen from 1 .. 5, got 1 .. 6"),
        (lambda: truncation.random_late_step(5, low=5, seed=0, update=0), "chosen from 0 .. 4, got 5 .. 4"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_planning_needs_no_torch() -> None:
    code = "import sys, genrl.mdp.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.integers(0, 400), st.integers(1, 40), st.integers(0, 15))
def test_sliding_depths_keep_their_number_and_stop(iteration: int, interval: int, stop: int) -> None:
    window = sliding_depths(range(15, 20), iteration=iteration, interval=interval, stop=stop)
    assert len(window) == 5 and stop <= window.start <= 15
    assert window.start == max(stop, 15 - iteration // interval)


# -- Talk2Move's steps: golden talk2move_rewards (its exit step and call counts; the rewards are tested with theirs)
NAN = float("nan")


def test_golden_exit_step_and_calls(golden) -> None:
    a = Arrays(golden("talk2move_rewards"))
    rewards = a.given("exit_rewards_prompt_step_sample")
    a.check("exit_variance_per_step", early_exit.exit_variance(rewards))
    a.check("exit_step", early_exit.exit_step(rewards))
    for length, exit_step, shortcut, calls in a.given("active_T_K_shortcut_nfe").tolist():
        assert exit_step + shortcut == calls
        grid = linspace_grid(length)
        assert len(early_exit.shortcut_sigmas(grid, exit_step, shortcut)) - 1 == calls - exit_step
    a.all_used("(exit|active)_.*")
    # Missing scores are left out
    rewards = torch.tensor([[[1.0, 3.0, NAN], [5.0, NAN, NAN]], [[NAN, NAN, NAN], [2.0, 2.0, 2.0]]])
    assert early_exit.exit_variance(rewards).tolist() == [1.0, 0.0]
    assert early_exit.exit_step(torch.full((1, 3, 2), NAN)) == 0
    # The shortcut goes evenly to no noise
    grid = shifted_grid(10, 3.0)
    path = early_exit.shortcut_sigmas(grid, 4, 2)
    assert path[0] == grid[4] and path[-1] == 0 and torch.allclose(path.diff(), -grid[4] / 2)


# -- Which steps a reward's gradient reaches
@given(st.integers(1, 40), st.data())
def test_truncated_steps_end_with_the_last(num_steps: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, num_steps))
    assert list(truncation.last_steps(num_steps, k)) == list(range(num_steps))[-k:]
    update = data.draw(st.integers(0, 99))
    sampled = truncation.random_truncation(num_steps, high=k, seed=3, update=update)
    assert sampled.stop == num_steps and 1 <= len(sampled) <= k
    assert sampled == truncation.random_truncation(num_steps, high=k, seed=3, update=update)


def test_lengths_and_steps_are_drawn_evenly() -> None:
    lengths = torch.tensor([len(truncation.random_truncation(5, high=5, seed=1, update=u)) for u in range(2000)])
    assert (torch.bincount(lengths, minlength=6)[1:] - 400).abs().max() < 5 * 18
    steps = torch.tensor([truncation.random_late_step(10, low=6, seed=1, update=u) for u in range(2000)])
    counts = torch.bincount(steps, minlength=10)
    assert counts[:6].sum() == 0 and (counts[6:] - 500).abs().max() < 5 * 20
