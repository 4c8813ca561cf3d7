"""Trees, windows and tails on pipelines of six families, with no line written for any (DESIGN 1.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.rollout.forest import Drawn, roll_out
from genrl.mdp.plan import SamplingPlan, compress_tail, make_plan
from tests.diffusion.families import FAMILIES
from tests.diffusion.tiny_parts import Family

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

NAMES = ["sd15", "sd3", "flux", "qwen_image", "wan_t2v", "flux_kontext"]
STEPS = 4
EVERY = dict.fromkeys(range(STEPS - 1), 0.7)

PLANS = {
    "tree": make_plan(STEPS, noise=EVERY, splits={0: 2, 2: 2}),
    "spread tree": make_plan(STEPS, noise=EVERY, splits={0: 2, 2: 2}, spread=4.0),
    "window": make_plan(STEPS, noise={1: 0.7, 2: 0.7}, roots=2),
    "window tree": make_plan(STEPS, noise={1: 0.5, 2: 0.7}, splits={1: 2, 2: 2}, spread=0.5),
    "late split": make_plan(STEPS, noise={2: 0.7}, splits={2: 3}),
}


class Tried(NamedTuple):
    family: Family
    policy: Policy


@pytest.fixture(scope="module", params=NAMES)
def tried(request: pytest.FixtureRequest) -> Tried:
    family = FAMILIES[request.param]()
    return Tried(family, Policy(family.pipe))


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def drawn(tried: Tried, plan: SamplingPlan, batch_size: int = 3) -> Drawn:
    """Both prompts of the family, with their pictures where it edits."""
    below = plan.leaves // plan.roots
    slots = list(range(0, 2 * plan.leaves, below))
    rows = [slot // plan.leaves for slot in slots]
    sampling = {"num_inference_steps": plan.full_steps, **tried.family.call}
    prompts = Batch(["a red star", "two blue dogs"], [(7, 0, 0), (7, 0, 1)], sampling, inputs=tried.family.inputs)
    taken = prompts.take(rows)
    batch = Batch(taken.prompts, [(7, 0, slot) for slot in slots], taken.sampling, inputs=taken.inputs)
    return roll_out(tried.policy, batch, slots, plan, kernel_of(tried, plan), batch_size)


def kernel_of(tried: Tried, plan: SamplingPlan) -> Kernel:
    levels = {i: level for i, level in enumerate(plan.noise_levels) if level is not None}
    return Kernel("flow_sde" if tried.family.kind == "flow" else "ddim", 0.7, levels)


@pytest.mark.parametrize("name", PLANS)
def test_replay_minus_record_is_0(tried: Tried, name: str) -> None:
    plan = PLANS[name]
    before = tried.policy.model_calls
    found = drawn(tried, plan)
    calls = (tried.policy.model_calls - before) / (2 * plan.calls)
    assert calls in (1.0, 2.0)  # twice with guidance
    worst, seen = 0.0, 0
    for piece in found.pieces:
        assert sorted(piece.slots) == sorted(piece.trajectory.log_probs)
        for i, recorded in piece.trajectory.log_probs.items():
            replayed = tried.policy.replay(piece.trajectory, i).log_prob
            worst = max(worst, float((replayed - recorded).abs().max()))
            seen += len(recorded)
    assert worst == 0.0
    assert seen == 2 * plan.trained_edges(plan.stochastic)
    assert found.slots == list(range(2 * plan.leaves)) and found.final.isfinite().all()
    assert len({tuple(x.flatten().tolist()) for x in found.final}) == 2 * plan.leaves  # all differ


def test_leaves_decode(tried: Tried) -> None:
    found = drawn(tried, PLANS["window tree"])
    pictures = tried.policy.decode(found.batch.take([0, 3, 4]), found.final[[0, 3, 4]])
    assert len(pictures) == 3 and pictures.isfinite().all()
    assert not torch.equal(pictures[0], pictures[1])


def test_the_tail_ends_at_sigma_0(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    if tried.family.kind != "flow":
        pytest.skip("the solver of the tail is for flow models")
    seen = []
    velocity = tried.policy.velocity

    def watched(batch: Batch, state: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        seen.append((state, float(sigma), velocity(batch, state, sigma)))
        return seen[-1][2]

    monkeypatch.setattr(tried.policy, "velocity", watched)
    plan = compress_tail(make_plan(8, noise={0: 0.7}, splits={0: 2}), 0.5)
    found = drawn(tried, plan)
    assert plan.tail == (4, 7) and len(seen) == 2 * 4  # four leaves in calls of three and one
    state, sigma, last = (torch.cat([seen[k][0] for k in (3, 7)]), seen[3][1], torch.cat([seen[k][2] for k in (3, 7)]))
    torch.testing.assert_close(found.final, state - sigma * last, rtol=1e-5, atol=1e-5)
    assert seen[0][1] == float(found.sigmas[1]) and sigma > 0 and float(found.sigmas[-1]) == 0.0
