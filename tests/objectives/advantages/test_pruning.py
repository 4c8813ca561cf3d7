"""BranchGRPO's pruning on leaves (of depths: test_branchgrpo_golden); PODS's down-sampling."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp.plan import make_plan
from genrl.mdp.tree import Tree, grow
from genrl.objectives.advantages import pruning


def binary(steps: int, splits: tuple[int, ...]) -> Tree:
    return grow(make_plan(steps, noise=dict.fromkeys(range(steps), 0.3), splits=dict.fromkeys(splits, 2)))


FLUX = binary(20, (0, 3, 6, 9))
VALUES = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_the_paper_prunes_218_edges_to_138() -> None:
    """Both ways: 8.625 edges per leaf in the paper's table."""
    deep = pruning.depth_pruned(FLUX.depth, range(15, 20))
    leaves = pruning.best_siblings(FLUX.parent, FLUX.depth, VALUES, last_split=9)
    wide = pruning.width_pruned(FLUX.parent, FLUX.depth, leaves, last_split=9)
    extreme = pruning.width_pruned(FLUX.parent, FLUX.depth, pruning.extreme_leaves(VALUES, 4), last_split=9)
    assert int(deep.sum()) == int(wide.sum()) == int(extreme.sum()) == 138
    assert not torch.equal(wide, extreme)


def test_parent_top1_keeps_the_better_of_each_pair() -> None:
    kept = pruning.best_siblings(FLUX.parent, FLUX.depth, VALUES, last_split=9).view(8, 2)
    assert (kept.sum(1) == 1).all() and torch.equal(VALUES.view(8, 2)[kept], VALUES.view(8, 2).amax(1))
    rows = pruning.best_siblings(FLUX.parent, FLUX.depth, torch.stack([VALUES, -VALUES]), last_split=9)
    assert torch.equal(rows[0], ~rows[1])


def test_parent_top1_prefers_any_score_to_none() -> None:
    holes = VALUES.clone()
    holes[::2] = math.nan
    kept = pruning.best_siblings(FLUX.parent, FLUX.depth, holes, last_split=9)
    assert kept[1::2].all() and not kept[::2].any()
    ties = pruning.best_siblings(FLUX.parent, FLUX.depth, torch.zeros(16), last_split=9)
    assert ties[::2].all() and not ties[1::2].any()


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 99))
def test_extremes_are_the_ends_of_the_order(leaves: int, count: int, seed: int) -> None:
    values = torch.randn(leaves, generator=torch.Generator().manual_seed(seed)).round(decimals=0)
    kept = pruning.extreme_leaves(values, count)
    assert int(kept.sum()) == min(leaves, 2 * count)
    if 2 * count < leaves:
        inside, ordered = values[~kept], values.sort().values
        assert inside.max() <= ordered[-count] and inside.min() >= ordered[count - 1]
    with pytest.raises(ValueError, match="count: keeping the 0 best"):
        pruning.extreme_leaves(values, 0)


def test_leaves_without_a_score_are_no_extremes() -> None:
    values = torch.tensor([math.nan, 1.0, 2.0, 3.0, math.nan])
    assert pruning.extreme_leaves(values, 1).tolist() == [False, True, False, True, False]


@st.composite
def pruned(draw: st.DrawFn) -> tuple[Tree, int, Tensor]:
    steps = draw(st.integers(1, 5))
    splits = draw(st.lists(st.integers(0, steps - 1), min_size=1, max_size=3))
    tree = binary(steps, tuple(splits))
    count = draw(st.integers(1, len(tree.leaves)))
    values = torch.randn(2, len(tree.leaves), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return tree, max(splits), pruning.extreme_leaves(values, count)


@given(pruned())
def test_width_pruning_keeps_the_trunk_and_whole_paths(case: tuple[Tree, int, Tensor]) -> None:
    tree, last_split, leaves = case
    keep = pruning.width_pruned(tree.parent, tree.depth, leaves, last_split=last_split)
    assert not keep[:, tree.parent < 0].any()
    assert keep[:, (tree.depth > 0) & (tree.depth <= last_split + 1)].all()
    for row in range(len(leaves)):
        wanted = {n for k in leaves[row].nonzero()[:, 0] for n in tree.path(int(tree.leaves[k]))}
        found = {n for n in keep[row].nonzero()[:, 0].tolist() if tree.depth[n] > last_split + 1}
        assert found == {n for n in wanted if tree.depth[n] > last_split + 1}


def test_what_would_leave_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="width: no leaf of a tree is kept"):
        pruning.width_pruned(FLUX.parent, FLUX.depth, torch.zeros(16, dtype=torch.bool), last_split=9)


def test_no_pruning_of_depths_keeps_every_edge() -> None:
    assert torch.equal(pruning.depth_pruned(FLUX.depth, ()), FLUX.parent >= 0)


class TestMaxVariance:
    @pytest.mark.parametrize("size", [2, 3, 5, 8])
    def test_no_other_choice_has_more_variance(self, size: int) -> None:
        """Against all subsets: continuous, binary and far-off values."""
        source = torch.Generator().manual_seed(size)
        continuous = torch.rand(40, size, generator=source, dtype=torch.float64)
        for values in (continuous, (continuous > 0.6).double(), continuous**4 + 1e6):
            for count in range(1, size + 1):
                kept = pruning.max_variance(values, count)
                assert (kept.sum(1) == count).all()
                for row, mask in zip(values, kept, strict=True):
                    centred = row - row.mean()
                    best = max(centred[list(some)].var(correction=0) for some in combinations(range(size), count))
                    assert centred[mask].var(correction=0) == pytest.approx(float(best), rel=1e-6, abs=1e-12)

    def test_half_of_binary_rewards_is_half_right_where_it_can_be(self) -> None:
        rewards = torch.tensor([[1, 0, 0, 0, 0, 1, 0, 0.0], [1, 1, 1, 1, 1, 1, 1, 0]])
        kept = pruning.max_variance(rewards, 4)
        assert rewards[0][kept[0]].sum() == 2 and rewards[1][kept[1]].sum() == 3

    def test_samples_without_a_score_fill_up(self) -> None:
        rewards = torch.tensor([[torch.nan, 0.5, torch.nan, 0.2], [0.1, torch.nan, 0.9, 0.5]])
        assert pruning.max_variance(rewards, 2).tolist() == [[False, True, False, True], [True, False, True, False]]
        assert pruning.max_variance(rewards, 3)[0].sum() == 3 and pruning.max_variance(rewards, 3)[1].tolist() == [
            True,
            False,
            True,
            True,
        ]

    def test_counts_that_cannot_be(self) -> None:
        for count in (0, 4):
            with pytest.raises(ValueError, match=f"{count} samples cannot be kept of groups of 3"):
                pruning.max_variance(torch.rand(2, 3), count)
