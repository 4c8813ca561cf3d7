"""Pipelines that start from a picture: they cut their schedule by its strength, and put it back where a mask says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genrl.config import ConfigError, load
from genrl.diffusion.config.pipeline_classes import strength_problem
from genrl.diffusion.evaluate import evaluation_arguments
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Children, Kernel
from genrl.diffusion.rollout.rollout import call_arguments
from tests.diffusion.families import FAMILIES
from tests.diffusion.policy.tiers import tiered
from tests.diffusion.tiny_parts import Family

KEYS = [(7, 0, 0), (7, 0, 1)]
HALF = (
    *("sd15_img2img", "sd15_inpaint", "sdxl_img2img", "sd3_img2img"),
    *("flux_img2img", "flux_inpaint", "z_image_img2img"),
)


def opened(name: str, **call: object) -> tuple[Family, Policy, Batch]:
    family = FAMILIES[name]()
    sampling = {"num_inference_steps": 8, **family.call, **call}
    batch = Batch(prompts=["a red star", "two blue dogs"], keys=KEYS, sampling=sampling, inputs=family.inputs)
    return family, Policy(family.pipe), batch


@pytest.mark.parametrize("name", tiered(HALF, ("sd15_inpaint", "sd3_img2img")))
def test_strength_below_one(name: str) -> None:
    """Half of the schedule is run: recorded, replayed, resumed and decoded as a whole one, and like the pipeline's."""
    family, policy, batch = opened(name, strength=0.5)
    kernel = Kernel("flow_sde", 0.7) if family.kind == "flow" else Kernel("ddim", 1.0)
    with torch.no_grad():
        recorded = policy.roll_out(batch, kernel, (0, 1, 2))
        assert recorded.stop == 4 and sorted(recorded.log_probs) == [0, 1, 2]
        for index, log_prob in recorded.log_probs.items():
            assert torch.equal(policy.replay(recorded.step(index)).log_prob, log_prob), f"step {index}"
        first = policy.roll_out(batch, kernel, (0, 1, 2), stop=2)
        rest = policy.roll_out(batch, kernel, (0, 1, 2), start=2, state=first.final)
        assert torch.equal(rest.final, recorded.final)
        assert policy.decode(batch, recorded.final).isfinite().all()
        if family.kind == "flow":
            assert recorded.sigmas[0] < 0.99 and recorded.sigmas[-1] == 0
            torch.testing.assert_close(policy.roll_out(batch).final, policy.generate(batch), rtol=1e-4, atol=1e-4)
            late = policy.velocity(batch, recorded.initial, torch.tensor(0.95))  # before the cut
            assert not torch.equal(late, policy.velocity(batch, recorded.initial, recorded.sigmas[0]))


@pytest.mark.parametrize("name", ["flux_inpaint", "sd15_inpaint"])
def test_steps_one_by_one_are_those_of_a_rollout(name: str) -> None:
    """The picture is put back after each of them, at its noise level."""
    _, policy, batch = opened(name, num_inference_steps=4)
    with torch.no_grad():
        whole = policy.roll_out(batch)
        state = whole.initial
        for index in range(4):
            state = policy.advance(batch, state, index)
    assert torch.equal(state, whole.final)
    moved = policy.advance(batch, whole.initial.clone().requires_grad_(), 1)
    assert moved.requires_grad


def test_the_picture_is_kept_outside_the_mask() -> None:
    _, policy, batch = opened("sd15_inpaint", num_inference_steps=4)
    with torch.no_grad():
        one, other = policy.roll_out(batch).final, policy.roll_out(batch, Kernel("ddim", 1.0), (0, 1, 2)).final
    half = one.shape[-1] // 2
    assert torch.equal(one[..., :half], other[..., :half])
    assert not torch.equal(one[..., half:], other[..., half:])


def test_inpainting_does_not_branch() -> None:
    _, policy, batch = opened("flux_inpaint", num_inference_steps=4)
    children = Children(torch.tensor([0, 0, 1, 1]), [(7, 0, k) for k in range(4)])
    with pytest.raises(ValueError, match="cannot branch: it blends the picture into its states"):
        policy.roll_out(batch, Kernel("flow_sde", 0.7), (1,), stop=2, children=children)


def config(folder: Path, steps: int, **args: object) -> object:
    (folder / "train.txt").write_text("a cat\n" * 9)
    path = folder / "run.yaml"
    path.write_text(
        f"model: {{path: {folder}}}\nprompts: {{train: {folder / 'train.txt'}}}\nrewards: [{{name: jpeg_size}}]\n"
        "evaluation: {every: 0, num_inference_steps: 6}\noptimizer: {lr: 1e-5}\n"
        f"trainer: {{algorithm: flow_grpo}}\nsampling: {{num_inference_steps: {steps}, pipeline_args: {args}}}\n"
    )
    return load(path)


def test_steps_are_those_that_are_left(tmp_path: Path) -> None:
    found = config(tmp_path, 12, strength=0.6)
    assert call_arguments(found.sampling)["num_inference_steps"] == 20
    assert evaluation_arguments(found)["num_inference_steps"] == 10
    with pytest.raises(ConfigError, match=r"no whole number of steps leaves 10 at strength 0\.6.*write 9 steps"):
        config(tmp_path, 10, strength=0.6)
    with pytest.raises(ConfigError, match="above 0 and at most 1, found 1.5"):
        config(tmp_path, 10, strength=1.5)


def test_a_strength_has_to_be_said() -> None:
    assert "(strength 0.6) unless told; write 1" in str(strength_problem("FluxImg2ImgPipeline", {}))
    assert strength_problem("FluxImg2ImgPipeline", {"strength": 0.6}) is None
    assert strength_problem("FluxFillPipeline", {}) is None
    assert "does not cut its schedule by it" in str(strength_problem("LTXConditionPipeline", {"strength": 0.5}))
