"""Trees in the running policy: what spec and closed forms promise, on a tiny SD3, and on pipelines of six families."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from diffusers import DiffusionPipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from genrl.diffusion.methods.flow_grpo.settings import Tree as TreeSettings
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Children, Kernel, Trajectory
from genrl.diffusion.rollout.forest import Drawn, roll_out
from genrl.diffusion.steps.plans import tree_edges
from genrl.mdp.plan import SamplingPlan, compress_tail, make_plan
from genrl.mdp.tree import Tree, grow
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES, tiered
from tests.diffusion.tiny_parts import Family

SD3 = Family("sd3", DiffusionPipeline(), runs.CALL)
"""How the policy of most tests is called: unguided."""


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(FAMILIES["sd3"]().pipe)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


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


def drawn(policy: Policy, plan: SamplingPlan, batch_size: int = 100, family: Family = SD3) -> Drawn:
    batch, slots = roots(plan, family)
    return roll_out(
        policy, batch, slots, plan, kernel_of(plan, "flow_sde" if family.kind == "flow" else "ddim"), batch_size
    )


def edges_of(found: Drawn) -> dict[tuple[int, int], tuple[Tensor, float]]:
    """(step, slot) -> (next state, log-probability) of every recorded transition."""
    every = {}
    for piece in found.pieces:
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
    found = drawn(policy, plan, batch_size=3)
    assert policy.model_calls - before == 2 * plan.calls  # two prompts
    assert found.slots == list(range(2 * plan.leaves)) and len(found.final) == len(found.batch) == 2 * plan.leaves
    tree, every = grow(plan), edges_of(found)
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
    for piece in found.pieces:
        for i, recorded in piece.trajectory.log_probs.items():
            assert torch.equal(policy.replay(piece.trajectory.step(i)).log_prob, recorded)
    assert policy.model_calls - before == 2 * plan.training_calls(plan.stochastic)
    whole = drawn(policy, plan)  # in one batch: the same up to the rounding of differently shaped calls
    torch.testing.assert_close(found.final, whole.final, rtol=1e-3, atol=1e-4)
    logs = edges_of(whole)
    assert all(every[key][1] == pytest.approx(logs[key][1], abs=1e-4) for key in every)
    assert all(len(piece.trajectory.batch) <= 3 for piece in found.pieces)


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


def test_siblings_differ_and_are_correlated_as_told(policy: Policy) -> None:
    """The noises of siblings have correlation 1 / (1 + spread^2): over 16 x 256 numbers within four deviations."""
    for spread, expected in ((None, 0.0), (0.5, 0.8), (2.0, 0.2)):
        plan = make_plan(2, noise={0: 0.7}, splits={0: 16}, spread=spread)
        found = drawn(policy, plan)
        piece = found.pieces[0]
        replayed = policy.replay(piece.trajectory.step(0))
        noise = ((piece.trajectory.next_states[0] - replayed.mean) / replayed.std).flatten(1)[:16].double()
        assert float(noise.std()) == pytest.approx(1.0, abs=0.1)
        off = torch.corrcoef(noise)[~torch.eye(16, dtype=torch.bool)]
        assert float(off.mean()) == pytest.approx(expected, abs=0.05)
        assert not torch.equal(noise[0], noise[1])


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
    found = drawn(policy, plan)
    assert policy.model_calls - before == 2 * plan.calls
    levels = [sigma for _, sigma, _ in seen]
    assert len(levels) == plan.tail.steps and levels == sorted(levels, reverse=True)
    assert levels[0] == float(found.sigmas[2])
    state, sigma, last = seen[-1]  # the solver's last step is to the predicted clean sample
    torch.testing.assert_close(found.final, state - sigma * last, rtol=1e-5, atol=1e-6)
    if ratio == 1.0:
        torch.testing.assert_close(torch.tensor(levels), found.sigmas[2:-1], rtol=1e-5, atol=1e-6)


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
        found = drawn(policy, plan, 3, family)
        assert (policy.model_calls - before) / (2 * plan.calls) in (1.0, 2.0)  # twice with guidance
        for piece in found.pieces:
            assert sorted(piece.slots) == sorted(piece.trajectory.log_probs)
            for i, recorded in piece.trajectory.log_probs.items():
                assert torch.equal(policy.replay(piece.trajectory.step(i)).log_prob, recorded)
        assert len(edges_of(found)) == 2 * plan.trained_edges(plan.stochastic)
        assert found.slots == list(range(2 * plan.leaves)) and found.final.isfinite().all()
        assert len({tuple(x.flatten().tolist()) for x in found.final}) == 2 * plan.leaves  # all differ
    pictures = policy.decode(found.batch.take([0, 3, 4]), found.final[[0, 3, 4]])
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
    found = drawn(policy, plan, batch_size=3)
    with torch.enable_grad():
        for piece in found.pieces:
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
