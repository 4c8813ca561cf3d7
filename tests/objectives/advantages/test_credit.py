"""Credit on shared edges: the identities that make a tree a stand-in for independent rollouts."""

import json
import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp.plan import make_plan
from genrl.mdp.tree import Tree, from_parents, grow
from genrl.objectives import credit


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Ragged trees: every node has 0 (never at the roots) to 3 children, ends at any depth."""
    parents = [-1] * draw(st.integers(1, 2))
    level = list(range(len(parents)))
    for depth in range(draw(st.integers(1, 4))):
        born = []
        for node in level:
            for _ in range(draw(st.integers(0 if depth else 1, 3))):
                born.append(len(parents))
                parents.append(node)
        level = born
    return from_parents(parents)


def numbers(size: int, seed: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def below(tree: Tree, node: int) -> list[int]:
    return [k for k, leaf in enumerate(tree.leaves.tolist()) if node in tree.path(leaf)]


@given(trees(), st.integers(0, 99), st.data())
def test_leaves_without_a_score_are_left_out(tree: Tree, seed: int, data) -> None:
    values, logs = numbers(len(tree.leaves), seed), numbers(tree.num_nodes, seed + 1)
    missing = data.draw(st.sets(st.integers(0, len(values) - 1)))
    holes = values.clone()
    holes[list(missing)] = math.nan
    for backup in (credit.mean_of_leaves, credit.path_softmax, credit.level_softmax):
        more = () if backup is credit.mean_of_leaves else (logs,)
        result = backup(tree.parent, holes, *more)
        whole = backup(tree.parent, values, *more)
        for node in range(tree.num_nodes):
            kept = [k for k in below(tree, node) if k not in missing]
            assert bool(result[node].isnan()) == (not kept)
            if len(kept) == len(below(tree, node)):
                assert result[node] == pytest.approx(float(whole[node]), abs=1e-12)
            elif kept:
                assert values[kept].min() - 1e-12 <= result[node] <= values[kept].max() + 1e-12


def test_deterministic_edges_weigh_nothing() -> None:
    tree = grow(make_plan(4, noise={1: 0.7, 2: 0.7}, splits={1: 2, 2: 2}))
    values, logs = numbers(4, 0), 3 * numbers(tree.num_nodes, 1)
    logs[(tree.depth != 2) & (tree.depth != 3)] = math.nan
    zero = torch.where(logs.isnan(), 0.0, logs)
    for backup in (credit.path_softmax, credit.level_softmax):
        result = backup(tree.parent, values, logs)
        assert result.isfinite().all() and torch.equal(result, backup(tree.parent, values, zero))


def test_prompts_in_rows_are_treated_apart() -> None:
    tree = grow(make_plan(3, noise=dict.fromkeys(range(3), 0.7), splits={0: 2, 2: 3}))
    values, logs = numbers(2 * 5 * 6, 0).view(2, 5, 6), numbers(2 * 5 * tree.num_nodes, 1).view(2, 5, -1)

    def estimates(values: Tensor, logs: Tensor) -> list[Tensor]:
        return [
            credit.mean_of_leaves(tree.parent, values),
            credit.path_softmax(tree.parent, values, logs),
            credit.level_softmax(tree.parent, values, logs),
            credit.normalise_per_depth(logs, tree.depth).advantages,
        ]

    for many, one in zip(estimates(values, logs), estimates(values[1, 3], logs[1, 3]), strict=True):
        assert torch.allclose(many[1, 3], one, atol=1e-12)


def test_the_best_and_the_worst_of_a_branch_are_chosen_if_they_stand_out() -> None:
    scores = torch.tensor([0.6, 0.5, -0.6, 0.4, -0.5, 0.1, 2.0, 2.0, 1.9, math.nan, -3.0, math.nan])
    branch = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4])
    assert credit.branch_extremes(scores, branch).tolist() == [1, 0, -1, 0, 0, 0, 1, 0, 0, 0, -1, 0]
    assert credit.branch_extremes(scores, branch, high=0.4, low=-0.4)[3:5].tolist() == [1, -1]


def test_scores_are_against_the_history_of_their_own_prompt() -> None:
    history = credit.PromptHistory(stages=2)
    rounds = [torch.tensor([1.0, 2.0, 10.0]), torch.tensor([3.0, 4.0, 20.0]), torch.tensor([5.0, math.nan, 30.0])]
    scores = [history.normalise(rewards, ["a", "a", "b"]) for rewards in rounds]
    assert scores[0][2] == 0 and scores[2][1].isnan()  # a single reward says nothing
    assert json.loads(json.dumps(history.rewards)) == {"a": [[3.0, 4.0], [5.0]], "b": [[20.0], [30.0]]}
    last = history.normalise(torch.tensor([7.0]), ["a"])
    known = torch.tensor([3.0, 4.0, 5.0, 7.0]).double()  # two rounds are remembered
    assert last[0] == pytest.approx(float((7 - known.mean()) / known.std()))
    alone, again = credit.PromptHistory(stages=0), torch.tensor([1.0, 8.0])
    assert torch.equal(alone.normalise(again, ["a", "a"]), alone.normalise(again, ["a", "a"]))


def test_a_depth_is_normalised_from_four_nodes_on() -> None:
    for nodes, skipped in ((3, True), (4, False)):
        tree = from_parents([-1, *[0] * nodes, *range(1, nodes + 1)])
        values = credit.mean_of_leaves(tree.parent, numbers(nodes, 0))
        result = credit.normalise_per_depth(values, tree.depth)
        assert (1 in result.skipped) == skipped
        last = result.advantages[-nodes:]  # the leaves' depth always is
        assert abs(last.mean()) < 1e-6 and abs(last.std() - 1) < 1e-4
    values = torch.tensor([0.0, 1.0, 2.0, math.nan, 3.0, 6.0])  # a missing one gets nothing and changes no other
    result = credit.normalise_per_depth(values, torch.tensor([0, 1, 1, 1, 1, 1])).advantages
    kept = values[[1, 2, 4, 5]].double()
    assert result[3] == 0 and torch.allclose(result[[1, 2, 4, 5]], (kept - kept.mean()) / (kept.std() + 1e-8))


# -- BranchGRPO's pruning on leaves (of depths: test_tree_golden); PODS's down-sampling
def binary(steps: int, splits: tuple[int, ...]) -> Tree:
    return grow(make_plan(steps, noise=dict.fromkeys(range(steps), 0.3), splits=dict.fromkeys(splits, 2)))


FLUX = binary(20, (0, 3, 6, 9))
VALUES = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_the_paper_prunes_218_edges_to_138() -> None:
    """Both ways: 8.625 edges per leaf in the paper's table."""
    deep = credit.depth_pruned(FLUX.depth, range(15, 20))
    leaves = credit.best_siblings(FLUX.parent, FLUX.depth, VALUES, last_split=9)
    wide = credit.width_pruned(FLUX.parent, FLUX.depth, leaves, last_split=9)
    extreme = credit.width_pruned(FLUX.parent, FLUX.depth, credit.extreme_leaves(VALUES, 4), last_split=9)
    assert int(deep.sum()) == int(wide.sum()) == int(extreme.sum()) == 138
    for keep, chosen in ((wide, leaves), (extreme, credit.extreme_leaves(VALUES, 4))):  # whole paths below the trunk
        paths = {node for leaf in FLUX.leaves[chosen].tolist() for node in FLUX.path(leaf)}
        trunk = {node for node in range(FLUX.num_nodes) if 0 < FLUX.depth[node] <= 10}
        assert {*keep.nonzero()[:, 0].tolist()} == (paths | trunk) - {0}
    assert torch.equal(credit.depth_pruned(FLUX.depth, ()), FLUX.parent >= 0)


def test_parent_top1_keeps_the_better_of_each_pair_and_prefers_any_score_to_none() -> None:
    kept = credit.best_siblings(FLUX.parent, FLUX.depth, VALUES, last_split=9).view(8, 2)
    assert (kept.sum(1) == 1).all() and torch.equal(VALUES.view(8, 2)[kept], VALUES.view(8, 2).amax(1))
    rows = credit.best_siblings(FLUX.parent, FLUX.depth, torch.stack([VALUES, -VALUES]), last_split=9)
    assert torch.equal(rows[0], ~rows[1])
    holes = VALUES.clone()
    holes[::2] = math.nan
    kept = credit.best_siblings(FLUX.parent, FLUX.depth, holes, last_split=9)
    assert kept[1::2].all() and not kept[::2].any()
    ties = credit.best_siblings(FLUX.parent, FLUX.depth, torch.zeros(16), last_split=9)
    assert ties[::2].all() and not ties[1::2].any()


def test_extremes_are_the_ends_of_the_order() -> None:
    values = torch.tensor([math.nan, 1.0, 2.0, 3.0, 0.0, 2.0])
    assert credit.extreme_leaves(values, 1).tolist() == [False, False, False, True, True, False]
    assert credit.extreme_leaves(values[1:5], 2).all() and credit.extreme_leaves(values[1:4], 8).all()


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_no_other_choice_has_more_variance(size: int) -> None:
    """Against all subsets: continuous, binary and far-off values."""
    source = torch.Generator().manual_seed(size)
    continuous = torch.rand(40, size, generator=source, dtype=torch.float64)
    for values in (continuous, (continuous > 0.6).double(), continuous**4 + 1e6):
        for count in range(1, size + 1):
            kept = credit.max_variance(values, count)
            assert (kept.sum(1) == count).all()
            for row, mask in zip(values, kept, strict=True):
                centred = row - row.mean()
                best = max(centred[list(some)].var(correction=0) for some in combinations(range(size), count))
                assert centred[mask].var(correction=0) == pytest.approx(float(best), rel=1e-6, abs=1e-12)


def test_samples_without_a_score_fill_up() -> None:
    rewards = torch.tensor([[torch.nan, 0.5, torch.nan, 0.2], [0.1, torch.nan, 0.9, 0.5]])
    assert credit.max_variance(rewards, 2).tolist() == [[False, True, False, True], [True, False, True, False]]
    first, second = credit.max_variance(rewards, 3)
    assert first.sum() == 3 and second.tolist() == [True, False, True, True]
