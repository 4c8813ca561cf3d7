"""The estimates that benchmarks/gradient_noise.py compares."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gradient_noise import BASELINES, LEAVES, SPLITS, STEPS, credit, plan_of
from genrl.mdp.tree import grow


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("name", SPLITS)
def test_credit_is_unbiased(name: str, baseline: str) -> None:
    """An edge whose noise adds 1 to the rewards below it has credit m_e / G of it, and what is common to all leaves has
    none: so `sum of credit x grad log p` has the expectation of the gradient, whatever the tree."""
    tree = grow(plan_of(name))
    assert float(credit(tree, torch.full((LEAVES,), 3.0).double(), baseline).abs().max()) < 1e-12
    for node in range(tree.num_nodes):
        depth, first, below = (int(of[node]) for of in (tree.depth, tree.first_leaf, tree.num_leaves))
        if depth == 0 or below == LEAVES:
            continue
        raised = torch.zeros(LEAVES).double()
        raised[first : first + below] = 1.0
        assert float(credit(tree, raised, baseline)[depth - 1, first]) == pytest.approx(below / LEAVES)


def test_relatives_are_the_closest_other_leaves() -> None:
    """Of two leaves that part at the last split, what is common to both and not to the group is taken off."""
    tree = grow(plan_of("in two at 0, 1, 2"))
    rewards = torch.tensor([5.0, 7.0] + [0.0] * (LEAVES - 2)).double()
    last = {baseline: credit(tree, rewards, baseline)[STEPS - 2, :2] * LEAVES for baseline in BASELINES}
    torch.testing.assert_close(last["relatives"], torch.tensor([-2.0, 2.0]).double())
    torch.testing.assert_close(last["group"], torch.tensor([5.0 - 7 / 7, 7.0 - 5 / 7]).double())
