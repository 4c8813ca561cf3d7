"""The tree's arrays and random numbers: branching 1 is independent rollouts, siblings differ, a leaf stands alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp.noise import derive_seed, keyed_noise
from genrl.mdp.plan import SamplingPlan, caterpillar, make_plan
from genrl.mdp.tree import Tree, edge_noise, from_parents, grow
from tests.mdp.test_plan import plans

KEY = (5, 2)  # run seed, iteration
SHAPE = (3,)


@given(plans())
def test_segments_cover_every_edge_once_and_cost_what_the_plan_says(plan: SamplingPlan) -> None:
    tree = grow(plan, *KEY)
    segments = tree.segments()
    assert [segment.start for segment in segments] == [0, *(segment.stop for segment in segments[:-1])]
    assert segments[-1].stop == plan.steps
    assert sum((s.stop - s.start) * len(s.rows) for s in segments) == plan.calls
    drawn = []
    for segment in segments:
        for depth in range(segment.start + 1, segment.stop):  # no branching inside: one node per row
            drawn += tree.level(depth)
            before = tree.level(depth - 1)
            assert tree.parent[list(tree.level(depth))].tolist() == list(before)
            assert torch.equal(tree.first_leaf[list(tree.level(depth))], tree.first_leaf[segment.rows])
        drawn += segment.children.tolist()
        above = torch.tensor(list(tree.level(segment.stop - 1)))
        assert torch.equal(above[segment.parent_row], tree.parent[segment.children])
    assert sorted(drawn) == list(range(plan.roots, tree.num_nodes))


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
                    noise = edge_noise(
                        SHAPE, keys[child], step, parent_key=keys[node], spread=spread if split else None
                    )
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
