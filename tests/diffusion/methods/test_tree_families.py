"""Trees, windows and tails on pipelines of six families, with no line written for any."""

import pytest
import torch

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.rollout.forest import Drawn, roll_out
from genrl.mdp.plan import SamplingPlan, make_plan
from tests.diffusion.families import FAMILIES
from tests.diffusion.policy.tiers import tiered
from tests.diffusion.tiny_parts import Family

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


def drawn(family: Family, policy: Policy, plan: SamplingPlan, batch_size: int = 3) -> Drawn:
    """Both prompts of the family, with their pictures where it edits."""
    below = plan.leaves // plan.roots
    slots = list(range(0, 2 * plan.leaves, below))
    sampling = {"num_inference_steps": plan.full_steps, **family.call}
    prompts = Batch(["a red star", "two blue dogs"], [(7, 0, 0), (7, 0, 1)], sampling, inputs=family.inputs)
    taken = prompts.take([slot // plan.leaves for slot in slots])
    batch = Batch(taken.prompts, [(7, 0, slot) for slot in slots], taken.sampling, inputs=taken.inputs)
    levels = {i: level for i, level in enumerate(plan.noise_levels) if level is not None}
    kernel = Kernel("flow_sde" if family.kind == "flow" else "ddim", 0.7, levels)
    return roll_out(policy, batch, slots, plan, kernel, batch_size)


@torch.no_grad()
@pytest.mark.parametrize("name", tiered(NAMES, ("sd15", "sd3")))
def test_trees_and_windows(name: str) -> None:
    """Replay is the record, every edge is drawn once, leaves decode and differ."""
    family = FAMILIES[name]()
    policy = Policy(family.pipe)
    for plan in PLANS.values():
        before = policy.model_calls
        found = drawn(family, policy, plan)
        assert (policy.model_calls - before) / (2 * plan.calls) in (1.0, 2.0)  # twice with guidance
        seen = 0
        for piece in found.pieces:
            assert sorted(piece.slots) == sorted(piece.trajectory.log_probs)
            for i, recorded in piece.trajectory.log_probs.items():
                assert torch.equal(policy.replay(piece.trajectory.step(i)).log_prob, recorded)
                seen += len(recorded)
        assert seen == 2 * plan.trained_edges(plan.stochastic)
        assert found.slots == list(range(2 * plan.leaves)) and found.final.isfinite().all()
        assert len({tuple(x.flatten().tolist()) for x in found.final}) == 2 * plan.leaves  # all differ
    pictures = policy.decode(found.batch.take([0, 3, 4]), found.final[[0, 3, 4]])
    assert len(pictures) == 3 and pictures.isfinite().all() and not torch.equal(pictures[0], pictures[1])
