"""From leaf rewards to tables over (step, slot): what an edge is worth, and what it weighs."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from genrl.diffusion.methods.dynamic_tree_rpo.train import progress_table
from genrl.diffusion.methods.flow_grpo.settings import Tree as TreeSettings
from genrl.diffusion.steps.plans import Edges, Steps, from_table, independent_edges, to_table, tree_edges
from genrl.mdp.plan import SamplingPlan, make_plan
from genrl.mdp.tree import Tree, grow

CLIP = 5.0


@st.composite
def plans(draw: st.DrawFn) -> SamplingPlan:
    steps = draw(st.integers(2, 6))
    ways = draw(st.lists(st.integers(1, 3), min_size=steps - 1, max_size=steps - 1).filter(lambda w: math.prod(w) > 1))
    splits = {i: w for i, w in enumerate(ways) if w > 1}
    return make_plan(steps, noise=dict.fromkeys(range(steps - 1), 0.7), splits=splits, roots=draw(st.integers(1, 2)))


def edges(plan: SamplingPlan, rewards: Tensor, advantages: Tensor | None = None, **chosen: Any) -> Edges:
    settings, old = TreeSettings(**{"ways": 2, **chosen}), torch.full((plan.steps, len(rewards)), -1.0)
    taken = rewards if advantages is None else advantages
    return tree_edges(settings, plan, plan.stochastic, rewards, taken, old, clip=CLIP, iteration=0)


def below(tree: Tree, step: int, slot: int) -> range | None:
    """Slots of the leaves below the edge of this step and slot; None where there is none."""
    for node in tree.level(step + 1):
        if int(tree.first_leaf[node]) == slot:
            return range(slot, slot + int(tree.num_leaves[node]))
    return None


def values(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40)
@given(plan=plans(), weight=st.sampled_from(["leaf_multiplicity", "per_edge"]), missing=st.sets(st.integers(0, 5)))
def test_a_shared_edge_is_worth_the_mean_of_its_leaves(plan: SamplingPlan, weight: str, missing: set[int]) -> None:
    """Of those that have a score; and it weighs as many, or one. Two prompts."""
    tree, rewards = grow(plan), values(2 * plan.leaves)
    rewards[[slot for slot in missing if slot < len(rewards)]] = math.nan
    found = edges(plan, rewards, rewards.nan_to_num(0.0), weight=weight)
    for step in range(plan.steps):
        for slot in range(2 * plan.leaves):
            first = slot - slot % plan.leaves
            leaves = below(tree, step, slot - first)
            scored = [rewards[first + leaf] for leaf in leaves or () if not rewards[first + leaf].isnan()]
            if step not in plan.stochastic or not scored:
                assert float(found.weight[step, slot]) == float(found.advantage[step, slot]) == 0.0
                continue
            mean = float(sum(scored) / len(scored))
            assert float(found.advantage[step, slot]) == pytest.approx(mean, abs=1e-12)
            assert float(found.weight[step, slot]) == (len(scored) if weight == "leaf_multiplicity" else 1)


@settings(max_examples=40)
@given(plan=plans())
def test_tables_are_values_of_nodes(plan: SamplingPlan) -> None:
    tree = grow(plan)
    nodes = values(2 * tree.num_nodes).view(2, -1)
    back = from_table(to_table(nodes, tree), tree)
    inner = tree.depth > 0
    assert torch.equal(back[:, inner], nodes[:, inner]) and back[:, ~inner].isnan().all()


def test_independent_samples_have_their_own_advantages_and_progress_falls_short_of_the_best_leaf() -> None:
    plan = make_plan(4, noise={1: 0.7, 2: 0.7}, roots=3)
    found = independent_edges(torch.tensor([1.0, -2.0, 0.0]), Steps(plan, (1, 2), (), None))
    assert found.advantage.tolist() == [[0] * 3, [1, -2, 0], [1, -2, 0], [0] * 3]
    assert found.weight.tolist() == [[0] * 3, [1] * 3, [1] * 3, [0] * 3]
    rewards = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0, 6.0, 4.0, 0.0])
    found = progress_table(grow(BINARY), rewards)
    torch.testing.assert_close(found[3], (8 - rewards.double()) / 8, rtol=0, atol=1e-6)
    assert float(found[0, 0]) == pytest.approx(float((8 - rewards[:4]).mean() / 8))
    assert float(found[2, 4]) == 0.0  # the best


BINARY = make_plan(5, noise=dict.fromkeys(range(4), 0.7), splits={0: 2, 1: 2, 2: 2})


def test_depths_with_fewer_than_four_states_are_measured_against_the_leaves() -> None:
    """Depth 1 has two: +-0.707 whatever the rewards. Depths 2 and on are normalised by themselves."""
    rewards = values(8)
    found = edges(BINARY, rewards, normalise="depth")
    assert found.skipped == [1]
    late = make_plan(5, noise={3: 0.7}, splits={3: 4}, roots=2)  # two states at depths 0 to 3, eight leaves
    assert edges(late, rewards, normalise="depth").skipped == []  # depths that are not trained are not reported
    leaf, pairs = (rewards - rewards.mean()) / rewards.std(), rewards.view(4, 2).mean(1)
    wanted = {3: leaf, 0: leaf.view(2, 4).mean(1), 1: (pairs - pairs.mean()) / pairs.std()}
    for depth, slots in ((3, range(8)), (0, (0, 4)), (1, (0, 2, 4, 6))):
        torch.testing.assert_close(found.advantage[depth][[*slots]], wanted[depth], rtol=0, atol=1e-6)


def test_what_is_pruned_is_not_trained() -> None:
    """The worse sibling below the last split; those depths; a group without scores, which stops nothing."""
    rewards = values(8)
    found = edges(BINARY, rewards, prune={"width": "best_sibling"})
    kept = rewards.view(4, 2).argmax(1) + torch.arange(0, 8, 2)
    assert found.weight[3].nonzero()[:, 0].tolist() == kept.tolist()
    assert (found.weight[:3].sum(1) == 8).all()  # up to the last split all is trained
    found = edges(BINARY, rewards, prune={"depths": [2, 3]})
    assert [bool(row.any()) for row in found.weight] == [True, False, False, True, False]
    both = torch.cat([rewards, torch.full((8,), math.nan, dtype=torch.float64)])
    for width in ("best_sibling", "extremes"):
        found = edges(BINARY, both, both.nan_to_num(0.0), prune={"width": width})
        assert float(found.weight[:, 8:].abs().sum()) == 0.0 < float(found.weight[:, :8].sum())


@pytest.mark.parametrize("credit", ["path_softmax", "level_softmax"])
def test_likely_leaves_count_more_in_a_softmax(credit: Any) -> None:
    plan = make_plan(3, noise={0: 0.7, 1: 0.7}, splits={1: 2})
    logs, rewards = torch.full((3, 2), math.nan), torch.tensor([1.0, 0.0])
    logs[0, 0], logs[1, 0], logs[1, 1] = -1.0, -1.0, -3.0
    settings = TreeSettings(ways=2, credit=credit)
    found = tree_edges(settings, plan, (0, 1), rewards, rewards, logs, clip=CLIP, iteration=0)
    assert float(found.advantage[0, 0]) == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-6)
