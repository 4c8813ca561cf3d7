"""No gradient through guidance's unconditional prediction: in every family whose guidance makes one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.policy.unconditional import Unconditional
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.policy.test_families import batch_of
from tests.diffusion.policy.tiers import tiered

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

UNGUIDED = ("flux", "flux2", "prx", "hunyuan_image", "hunyuan_video", "ace_step")
"""Guidance is an input of these, or a component, or none."""
GUIDED = [name for name in FAMILIES if name != "flux2_klein" and not name.startswith(UNGUIDED)] + ["flux2_klein"]
RENORMALISED = ("lumina2", "qwen", "longcat", "hunyuan_dit")
"""Their result has the length of the conditional prediction, so its gradient goes through that too."""


def gradient(policy: Policy, batch: Batch, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state after the first step, and the gradient of its weighted sum in all weights, [P]."""
    parameters = [p for denoiser in policy.denoisers.values() for p in denoiser.requires_grad_(True).parameters()]
    reached = policy.advance(batch, state, 0)
    weight = torch.randn(reached.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((reached * weight).sum(), parameters, allow_unused=True)
    return reached.detach(), torch.cat([torch.zeros(1) if one is None else one.flatten() for one in found])


@pytest.mark.parametrize("name", tiered(GUIDED, ("sd15", "sd3", "z_image", "lumina2")))
def test_only_the_conditional_prediction_is_trained(name: str) -> None:
    """v = v_u + s (v_c - v_u): the value stays, the gradient is s times that of v_c, which is v unguided."""
    family = FAMILIES[name]()
    policy, batch = Policy(family.pipe), batch_of(family)
    unguided = batch_of(family, **family.unguided)
    state = policy.roll_out(batch, stop=1).initial
    assert state is not None
    value, both = gradient(policy, batch, state)
    _, conditional = gradient(policy, unguided, state)
    calls = policy.model_calls
    Unconditional(policy, batch)
    assert policy.model_calls == calls
    same, detached = gradient(policy, batch, state)
    assert torch.equal(same, value)
    assert torch.equal(gradient(policy, unguided, state)[1], conditional)
    if name.startswith(RENORMALISED):
        assert (detached - both).norm() > 0.01 * detached.norm()
        return
    scale = float(family.call["guidance_scale"])  # type: ignore[arg-type]
    scale += 1 if name.startswith("z_image") else 0  # v_c + s (v_c - v_u)
    assert (detached - scale * conditional).norm() < 1e-3 * detached.norm()
    assert (detached - both).norm() > 0.1 * detached.norm()


def test_calls_of_their_own_keep_no_graph_and_a_failed_one_leaves_gradients_on() -> None:
    policy = Policy((family := FAMILIES["wan_t2v"]()).pipe)
    batch = batch_of(family)
    state = policy.roll_out(batch, stop=1).initial
    assert state is not None
    Unconditional(policy, batch)
    seen: list[bool] = []
    network = policy.denoiser
    forward = network.forward

    def watched(*args: object, **kwargs: object) -> object:
        seen.append(torch.is_grad_enabled())
        if len(seen) == 4:
            raise MemoryError("no room")
        return forward(*args, **kwargs)

    network.forward = watched
    policy.advance(batch, state, 0)
    assert seen == [True, False]
    with pytest.raises(MemoryError):
        policy.advance(batch, state, 1)
    assert seen == [True, False, True, False] and torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_without_a_second_prediction(name: str) -> None:
    policy = Policy((family := FAMILIES[name]()).pipe)
    with pytest.raises(ValueError, match="trainer.guidance_in_training: .*makes one prediction per step"):
        Unconditional(policy, batch_of(family, **family.unguided))


def test_a_run(folder: Path, model: Path) -> None:
    """Samples and ratios of the first iteration are those of a run that trains both; the gradient is another."""
    found = []
    for guidance in (True, "detached"):
        trainer = {"algorithm": "flow_grpo", "guidance_in_training": guidance}
        changes = {"trainer": trainer, "sampling": {"guidance_scale": 3.0}, "output": str(folder / f"run-{guidance}")}
        config = runs.config(folder, model, **changes, evaluation={"every": 0}, iterations=1)
        found.append(runs.rows(train(config))[-1])
    both, conditional = found
    alike = ("reward/total_mean", "ratio/mean", "ratio/max_abs_dev", "model_calls/sample", "model_calls/train")
    assert {key: both[key] for key in alike} == {key: conditional[key] for key in alike}
    assert conditional["ratio/max_abs_dev"] == 0 and both["grad_norm"] != conditional["grad_norm"] > 0
