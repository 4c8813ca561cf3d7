"""Trees in the running policy: what spec and closed forms promise, on a tiny SD3, and on pipelines of six families."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from genrl.diffusion.methods.dynamic_tree_rpo.train import progress_table
from genrl.diffusion.methods.flow_grpo.settings import Tree as TreeSettings
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Children, Kernel, Trajectory
from genrl.diffusion.rollout.forest import Samples, roll_out
from genrl.diffusion.steps.plans import Edges, Steps, from_table, independent_edges, to_table, tree_edges
from genrl.mdp.plan import SamplingPlan, compress_tail, make_plan
from genrl.mdp.tree import Tree, grow
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.tiny_parts import Family
from tests.run_folders import tiered

pytestmark = pytest.mark.usefixtures("no_grad")
SD3 = Family("sd3", DiffusionPipeline(), runs.CALL)
"""How the policy of most tests is called: unguided."""


@st.composite
def plans(draw: st.DrawFn) -> SamplingPlan:
    """Up to 4 steps, 2 trees of up to 8 leaves; the last step is deterministic, as in training."""
    steps = draw(st.integers(2, 4))
    ways = draw(st.lists(st.sampled_from([1, 1, 2]), min_size=steps - 1, max_size=steps - 1))
    noisy = [draw(st.booleans()) or w > 1 for w in ways]
    noise = {i: draw(st.sampled_from([0.3, 0.7])) for i in range(steps - 1) if noisy[i]}
    splits = {i: w for i, w in enumerate(ways) if w > 1}
    spread = draw(st.sampled_from([None, 0.5, 4.0])) if splits else None
    return make_plan(steps, noise=noise, splits=splits, roots=draw(st.integers(1, 2)), spread=spread)


def kernel_of(plan: SamplingPlan, name: str = "flow_sde") -> Kernel:
    return Kernel(name, 0.7, {i: level for i, level in enumerate(plan.noise_levels) if level is not None})


def roots(plan: SamplingPlan, family: Family) -> tuple[Batch, list[int]]:
    """The initial states of both prompts, as `collect` makes them, with their pictures where it edits."""
    slots = list(range(0, 2 * plan.leaves, plan.leaves // plan.roots))
    batch = family.batch(num_inference_steps=plan.full_steps).take([slot // plan.leaves for slot in slots])
    return replace(batch, keys=[(7, 3, slot) for slot in slots]), slots


def sample(policy: Policy, plan: SamplingPlan, batch_size: int = 100, family: Family = SD3) -> Samples:
    batch, slots = roots(plan, family)
    return roll_out(
        policy, batch, slots, plan, kernel_of(plan, "flow_sde" if family.kind == "flow" else "ddim"), batch_size
    )


def edges_of(result: Samples) -> dict[tuple[int, int], tuple[Tensor, float]]:
    """(step, slot) -> (next state, log-probability) of every recorded transition."""
    every = {}
    for piece in result.pieces:
        for i, slots in piece.slots.items():
            for row, slot in enumerate(slots):
                assert (i, slot) not in every  # what is shared is run once
                every[i, slot] = piece.trajectory.next_states[i][row], float(piece.trajectory.log_probs[i][row])
    return every


few = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@few
@given(plan=plans())
def test_counts_are_the_closed_forms_and_replay_equals_record(policy: Policy, plan: SamplingPlan) -> None:
    before = policy.model_calls
    actual = sample(policy, plan, batch_size=3)
    assert policy.model_calls - before == 2 * plan.calls  # two prompts
    assert actual.slots == list(range(2 * plan.leaves)) and len(actual.final) == len(actual.batch) == 2 * plan.leaves
    tree, every = grow(plan), edges_of(actual)
    assert len(every) == 2 * plan.trained_edges(plan.stochastic)
    expected = {
        (int(tree.depth[n]) - 1, p * plan.leaves + int(tree.first_leaf[n]))
        for p in range(2)
        for n in range(tree.num_nodes)
        if int(tree.depth[n]) - 1 in plan.stochastic
    }
    assert every.keys() == expected
    assert tree.num_nodes == sum(plan.nodes) and tree.num_nodes - plan.roots == plan.edges
    before = policy.model_calls
    for piece in actual.pieces:
        for i, recorded in piece.trajectory.log_probs.items():
            assert torch.equal(policy.replay(piece.trajectory.step(i)).log_prob, recorded)
    assert policy.model_calls - before == 2 * plan.training_calls(plan.stochastic)
    whole = sample(policy, plan)  # in one batch: the same up to the rounding of differently shaped calls
    torch.testing.assert_close(actual.final, whole.final, rtol=1e-3, atol=1e-4)
    logs = edges_of(whole)
    assert all(every[key][1] == pytest.approx(logs[key][1], abs=1e-4) for key in every)
    assert all(len(piece.trajectory.batch) <= 3 for piece in actual.pieces)


def walk(policy: Policy, plan: SamplingPlan, tree: Tree, prompt: int, leaf: int) -> list[Trajectory]:
    """One leaf made again alone from its root, step by step."""
    path, offset, steps = tree.path(int(tree.leaves[leaf])), prompt * plan.leaves, list[Trajectory]()
    keys = [(7, 3, offset + int(tree.first_leaf[node])) for node in path]
    of_prompt = SD3.batch(num_inference_steps=plan.steps).take([prompt])
    for i in range(plan.steps):
        splits = plan.branching[i] > 1
        assert splits or keys[i] == keys[i + 1]
        base = [keys[i]] if plan.spread is not None else None
        children = Children(torch.tensor([0]), [keys[i + 1]], base, plan.spread) if splits else None
        state, batch = steps[-1].final if steps else None, replace(of_prompt, keys=[keys[i]])
        place = {"start": i, "stop": i + 1, "state": state, "children": children}
        steps.append(policy.roll_out(batch, kernel_of(plan), plan.stochastic, **place))
    return steps


@pytest.mark.parametrize(("ratio", "splits"), [(0.3, {1: 3}), (0.5, {}), (1.0, {1: 3})])
def test_the_tail_is_the_solvers_and_ends_at_0(
    policy: Policy, ratio: float, splits: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, float, Tensor]] = []
    velocity = policy.velocity

    def watched(batch: Batch, state: Tensor, sigma: Tensor) -> Tensor:
        seen.append((state, float(sigma), velocity(batch, state, sigma)))
        return seen[-1][2]

    monkeypatch.setattr(policy, "velocity", watched)
    plan = compress_tail(make_plan(8, noise={1: 0.7}, splits=splits), ratio)
    assert plan.tail is not None
    before = policy.model_calls
    result = sample(policy, plan)
    assert policy.model_calls - before == 2 * plan.calls
    levels = [sigma for _, sigma, _ in seen]
    assert len(levels) == plan.tail.steps and levels == sorted(levels, reverse=True)
    assert levels[0] == float(result.sigmas[2])
    state, sigma, last = seen[-1]  # the solver's last step is to the predicted clean sample
    torch.testing.assert_close(result.final, state - sigma * last, rtol=1e-5, atol=1e-6)
    if ratio == 1.0:
        torch.testing.assert_close(torch.tensor(levels), result.sigmas[2:-1], rtol=1e-5, atol=1e-6)


def test_a_branch_without_noise_is_refused(policy: Policy) -> None:
    """flow_cps has none in its last step."""
    plan = make_plan(2, noise={1: 0.7}, splits={1: 2})
    with pytest.raises(ValueError, match="step 1 branches, but its transition has no variance"):
        roll_out(policy, *roots(plan, SD3), plan, Kernel("flow_cps", 0.7), 8)


EVERY = dict.fromkeys(range(3), 0.7)
PLANS = (
    *(make_plan(4, noise=EVERY, splits={0: 2, 2: 2}, spread=spread) for spread in (None, 4.0)),
    make_plan(4, noise={1: 0.7, 2: 0.7}, roots=2),
    make_plan(4, noise={1: 0.5, 2: 0.7}, splits={1: 2, 2: 2}, spread=0.5),
    make_plan(4, noise={2: 0.7}, splits={2: 3}),
)


@pytest.mark.parametrize("name", tiered("sd15 sd3 flux qwen_image wan_t2v flux_kontext".split(), ("sd15", "sd3")))
def test_trees_and_windows_of_families(name: str) -> None:
    """Replay is the record, every edge is drawn once, leaves decode and differ; with no line written for any."""
    family = FAMILIES[name]()
    policy = Policy(family.pipe)
    for plan in PLANS:
        before = policy.model_calls
        result = sample(policy, plan, 3, family)
        assert (policy.model_calls - before) / (2 * plan.calls) in (1.0, 2.0)  # twice with guidance
        for piece in result.pieces:
            assert sorted(piece.slots) == sorted(piece.trajectory.log_probs)
            for i, recorded in piece.trajectory.log_probs.items():
                assert torch.equal(policy.replay(piece.trajectory.step(i)).log_prob, recorded)
        assert len(edges_of(result)) == 2 * plan.trained_edges(plan.stochastic)
        assert result.slots == list(range(2 * plan.leaves)) and result.final.isfinite().all()
        assert len({tuple(x.flatten().tolist()) for x in result.final}) == 2 * plan.leaves  # all differ
    pictures = policy.decode(result.batch.take([0, 3, 4]), result.final[[0, 3, 4]])
    assert len(pictures) == 3 and pictures.isfinite().all() and not torch.equal(pictures[0], pictures[1])


@pytest.fixture(scope="module")
def trainable() -> tuple[Policy, Tensor]:
    """A policy, and one of its weights, which has gradients."""
    policy = Policy(FAMILIES["sd3"]().pipe)
    return policy, policy.denoiser.get_parameter("transformer_blocks.0.attn.to_q.weight").requires_grad_(True)


@settings(few, max_examples=4)
@given(plan=plans().filter(lambda plan: plan.stochastic))
def test_the_gradient_of_a_tree_is_that_of_its_leaves_as_rollouts(
    trainable: tuple[Policy, Tensor], plan: SamplingPlan
) -> None:
    """`sum_e m_e (mean A below e) grad l_e = sum_l A_l sum_i grad l_i`, every leaf walked from its root alone."""
    policy, weight = trainable
    tree, leaves = grow(plan), 2 * plan.leaves
    advantages = torch.randn(leaves, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tables = tree_edges(
        TreeSettings(ways=2), plan, plan.stochastic, advantages, advantages, torch.empty(0),
        clip=5.0, iteration=0,
    )  # fmt: skip
    assert float(tables.weight.sum()) == leaves * len(plan.stochastic)  # what separate rollouts are divided by
    shared, separate = torch.zeros(()), torch.zeros(())
    result = sample(policy, plan, batch_size=3)
    with torch.enable_grad():
        for piece in result.pieces:
            for i, slots in piece.slots.items():
                share = (tables.weight[i, slots] * tables.advantage[i, slots]).float()
                shared = shared + (share * policy.replay(piece.trajectory.step(i)).log_prob).sum()
    for slot in range(leaves):
        for step in walk(policy, plan, tree, *divmod(slot, plan.leaves)):
            for i in step.log_probs:
                with torch.enable_grad():
                    separate = separate + float(advantages[slot]) * policy.replay(step.step(i)).log_prob.sum()
    (ours,), (theirs,) = torch.autograd.grad(shared, weight), torch.autograd.grad(separate, weight)
    assert float(theirs.abs().max()) > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


# -- From leaf rewards to tables over (step, slot): what an edge is worth, and what it weighs
CLIP = 5.0


@st.composite
def split_plans(draw: st.DrawFn) -> SamplingPlan:
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
@given(
    plan=split_plans(), weight=st.sampled_from(["leaf_multiplicity", "per_edge"]), missing=st.sets(st.integers(0, 5))
)
def test_a_shared_edge_is_worth_the_mean_of_its_leaves(plan: SamplingPlan, weight: str, missing: set[int]) -> None:
    """Of those that have a score; and it weighs as many, or one. Two prompts."""
    tree, rewards = grow(plan), values(2 * plan.leaves)
    rewards[[slot for slot in missing if slot < len(rewards)]] = math.nan
    result = edges(plan, rewards, rewards.nan_to_num(0.0), weight=weight)
    for step in range(plan.steps):
        for slot in range(2 * plan.leaves):
            first = slot - slot % plan.leaves
            leaves = below(tree, step, slot - first)
            scored = [rewards[first + leaf] for leaf in leaves or () if not rewards[first + leaf].isnan()]
            if step not in plan.stochastic or not scored:
                assert float(result.weight[step, slot]) == float(result.advantage[step, slot]) == 0.0
                continue
            mean = float(sum(scored) / len(scored))
            assert float(result.advantage[step, slot]) == pytest.approx(mean, abs=1e-12)
            assert float(result.weight[step, slot]) == (len(scored) if weight == "leaf_multiplicity" else 1)


@settings(max_examples=40)
@given(plan=split_plans())
def test_tables_are_values_of_nodes(plan: SamplingPlan) -> None:
    tree = grow(plan)
    nodes = values(2 * tree.num_nodes).view(2, -1)
    back = from_table(to_table(nodes, tree), tree)
    inner = tree.depth > 0
    assert torch.equal(back[:, inner], nodes[:, inner]) and back[:, ~inner].isnan().all()


def test_independent_samples_have_their_own_advantages_and_progress_falls_short_of_the_best_leaf() -> None:
    plan = make_plan(4, noise={1: 0.7, 2: 0.7}, roots=3)
    result = independent_edges(torch.tensor([1.0, -2.0, 0.0]), Steps(plan, (1, 2), (), None))
    assert result.advantage.tolist() == [[0] * 3, [1, -2, 0], [1, -2, 0], [0] * 3]
    assert result.weight.tolist() == [[0] * 3, [1] * 3, [1] * 3, [0] * 3]
    rewards = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0, 6.0, 4.0, 0.0])
    result = progress_table(grow(BINARY), rewards)
    torch.testing.assert_close(result[3], (8 - rewards.double()) / 8, rtol=0, atol=1e-6)
    assert float(result[0, 0]) == pytest.approx(float((8 - rewards[:4]).mean() / 8))
    assert float(result[2, 4]) == 0.0  # the best


BINARY = make_plan(5, noise=dict.fromkeys(range(4), 0.7), splits={0: 2, 1: 2, 2: 2})


def test_depths_with_fewer_than_four_states_are_measured_against_the_leaves() -> None:
    """Depth 1 has two: +-0.707 whatever the rewards. Depths 2 and on are normalised by themselves."""
    rewards = values(8)
    actual = edges(BINARY, rewards, normalise="depth")
    assert actual.skipped == [1]
    late = make_plan(5, noise={3: 0.7}, splits={3: 4}, roots=2)  # two states at depths 0 to 3, eight leaves
    assert edges(late, rewards, normalise="depth").skipped == []  # depths that are not trained are not reported
    leaf, pairs = (rewards - rewards.mean()) / rewards.std(), rewards.view(4, 2).mean(1)
    wanted = {3: leaf, 0: leaf.view(2, 4).mean(1), 1: (pairs - pairs.mean()) / pairs.std()}
    for depth, slots in ((3, range(8)), (0, (0, 4)), (1, (0, 2, 4, 6))):
        torch.testing.assert_close(actual.advantage[depth][[*slots]], wanted[depth], rtol=0, atol=1e-6)


def test_what_is_pruned_is_not_trained() -> None:
    """The worse sibling below the last split; those depths; a group without scores, which stops nothing."""
    rewards = values(8)
    result = edges(BINARY, rewards, prune={"width": "best_sibling"})
    kept = rewards.view(4, 2).argmax(1) + torch.arange(0, 8, 2)
    assert result.weight[3].nonzero()[:, 0].tolist() == kept.tolist()
    assert (result.weight[:3].sum(1) == 8).all()  # up to the last split all is trained
    result = edges(BINARY, rewards, prune={"depths": [2, 3]})
    assert [bool(row.any()) for row in result.weight] == [True, False, False, True, False]
    both = torch.cat([rewards, torch.full((8,), math.nan, dtype=torch.float64)])
    for width in ("best_sibling", "extremes"):
        result = edges(BINARY, both, both.nan_to_num(0.0), prune={"width": width})
        assert float(result.weight[:, 8:].abs().sum()) == 0.0 < float(result.weight[:, :8].sum())


@pytest.mark.parametrize("credit", ["path_softmax", "level_softmax"])
def test_likely_leaves_count_more_in_a_softmax(credit: Any) -> None:
    plan = make_plan(3, noise={0: 0.7, 1: 0.7}, splits={1: 2})
    logs, rewards = torch.full((3, 2), math.nan), torch.tensor([1.0, 0.0])
    logs[0, 0], logs[1, 0], logs[1, 1] = -1.0, -1.0, -3.0
    settings = TreeSettings(ways=2, credit=credit)
    result = tree_edges(settings, plan, (0, 1), rewards, rewards, logs, clip=CLIP, iteration=0)
    assert float(result.advantage[0, 0]) == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-6)
