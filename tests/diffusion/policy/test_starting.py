"""Pipelines that start from a picture: they cut their schedule by its strength, and put it back where a mask says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

from genrl.diffusion.config.pipeline_classes import strength_problem
from genrl.diffusion.config.schema import Config
from genrl.diffusion.evaluate import evaluation_arguments
from genrl.diffusion.policy.decoding import Encoder
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Children, Kernel
from genrl.diffusion.policy.unconditional import Unconditional
from genrl.diffusion.rollout.rollout import call_arguments
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.tiny_parts import KEYS, PROMPTS
from tests.run_folders import tiered

HALF = (
    *("sd15_img2img", "sd15_inpaint", "sdxl_img2img", "sd3_img2img"),
    *("flux_img2img", "flux_inpaint", "z_image_img2img"),
)


@pytest.mark.parametrize("name", tiered(HALF, ("sd15_inpaint", "sd3_img2img")))
def test_strength_below_one(name: str) -> None:
    """Half of the schedule is run: recorded, replayed, resumed and decoded as a whole one, and like the pipeline's."""
    family = FAMILIES[name]()
    policy, batch = Policy(family.pipe), family.batch(num_inference_steps=8, strength=0.5)
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
    """The picture is put back after each at its level and, in the end, outside the mask: such flows cannot branch."""
    family = FAMILIES[name]()
    policy, batch = Policy(family.pipe), family.batch()
    with torch.no_grad():
        whole = policy.roll_out(batch)
        state = whole.initial
        for index in range(4):
            state = policy.advance(batch, state, index)
    assert torch.equal(state, whole.final)
    assert policy.advance(batch, whole.initial.clone().requires_grad_(), 1).requires_grad
    if name == "sd15_inpaint":
        one, other = whole.final, policy.roll_out(batch, Kernel("ddim", 1.0), (0, 1, 2)).final
        half = one.shape[-1] // 2
        assert torch.equal(one[..., :half], other[..., :half]) and not torch.equal(one[..., half:], other[..., half:])
        return
    children = Children(torch.tensor([0, 0, 1, 1]), [(7, 0, k) for k in range(4)])
    with pytest.raises(ValueError, match="cannot branch: it blends the picture into its states"):
        policy.roll_out(batch, Kernel("flow_sde", 0.7), (1,), stop=2, children=children)


def test_steps_are_those_that_are_left() -> None:
    """Steps and strengths that do not go together: tests/fixtures/config/impossible.yaml."""
    sampling = {"num_inference_steps": 12, "pipeline_args": {"strength": 0.6}}
    result = runs.unloaded(sampling=sampling, evaluation={"num_inference_steps": 6})
    assert call_arguments(result.sampling)["num_inference_steps"] == 20
    assert evaluation_arguments(result)["num_inference_steps"] == 10


def test_a_strength_has_to_be_said() -> None:
    assert "(strength 0.6) unless told; write 1" in str(strength_problem("FluxImg2ImgPipeline", {}))
    assert strength_problem("FluxImg2ImgPipeline", {"strength": 0.6}) is None
    assert strength_problem("FluxFillPipeline", {}) is None
    assert "does not cut its schedule by it" in str(strength_problem("LTXConditionPipeline", {"strength": 0.5}))


def editing(folder: Path, kontext: Path, **changes: Any) -> Config:
    """A run of an editing pipeline: each prompt's picture stands in a column of the prompt file."""
    random = np.random.default_rng(0)
    rows = []
    for k in range(3):
        Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / f"{k}.png")
        rows.append(json.dumps({"prompt": f"make it red {k}", "source_image": f"{k}.png"}))
    (folder / "edits.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "held_out.jsonl").write_text("\n".join(rows[:2]), encoding="utf-8")
    arguments = {"max_sequence_length": 16, "max_area": 256, "_auto_resize": False}
    sampling = {"inputs": {"image": "source_image"}, "guidance_scale": 2.5, "pipeline_args": arguments}
    prompts = {"train": str(folder / "edits.jsonl"), "eval": str(folder / "held_out.jsonl")}
    changes = {"prompts": prompts, **changes, "sampling": sampling | changes.get("sampling", {})}
    return runs.config(folder, kontext, **changes)


def test_columns_and_files_that_are_not_there_are_named(folder: Path, kontext: Path) -> None:
    quiet: dict[str, Any] = {"evaluation": {"every": 0}}
    config = editing(folder, kontext, sampling={"inputs": {"image": "source_imag"}}, **quiet)
    with pytest.raises(ValueError, match=r"sampling\.inputs\.image: .*edits\.jsonl:1 has no column .*source_image'\?"):
        train(config)
    config = editing(folder, kontext, **quiet)
    (folder / "1.png").unlink()
    with pytest.raises(ValueError, match=r"edits\.jsonl:2"):
        train(config)
    config = editing(folder, kontext, sampling={"inputs": {"imgae": "source_image"}}, **quiet)
    with pytest.raises(ValueError, match=r"imgae: FluxKontextPipeline takes no such argument.*did you mean image"):
        train(config)


ASSETS = Path(__file__).parents[3] / "assets"


@pytest.mark.parametrize("name", ["tiny-t2i", "tiny-sd"])
def test_pictures_come_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From samples of the model to pictures, to states, to pictures; what comes before decoding is looked at once."""
    policy = Policy(DiffusionPipeline.from_pretrained(ASSETS / name))
    batch = Batch([*PROMPTS], [*KEYS], {"num_inference_steps": 4, "guidance_scale": 1.0})
    with torch.no_grad():
        images = policy.decode(batch, policy.roll_out(batch).final)
        encoded = Encoder(policy)
        states = encoded(batch, images)
        again = policy.decode(batch, states)
        for method in ("decode", "state_shape"):
            monkeypatch.setattr(policy, method, None)  # a call of the pipeline would fail from here on
        flipped = encoded(batch, images.flip(0))
    assert float((again - images).abs().mean()) < 0.05
    torch.testing.assert_close(flipped.flip(0), states)


def test_an_autoencoder_that_does_not_give_pictures_back_is_refused() -> None:
    family = FAMILIES["sd3"]()
    policy, batch = Policy(family.pipe), family.batch()
    with torch.no_grad():
        striped = torch.zeros_like(policy.decode(batch, torch.zeros(policy.state_shape(batch))))
    striped[..., ::2] = 1.0
    with pytest.raises(ValueError, match=r"come back changed, by 0\.[1-9]"):
        Encoder(policy)(batch, striped)
    with pytest.raises(ValueError, match=r"encodes pictures of 8 x 8 to .* but StableDiffusion3Pipeline decodes"):
        Encoder(policy)(batch, striped[..., :8, :8])
    assert "decode" not in vars(policy.pipe.vae)


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
    result = torch.autograd.grad((reached * weight).sum(), parameters, allow_unused=True)
    return reached.detach(), torch.cat([torch.zeros(1) if one is None else one.flatten() for one in result])


@pytest.mark.parametrize("name", tiered(GUIDED, ("sd15", "sd3")))
def test_only_the_conditional_prediction_is_trained(name: str) -> None:
    """v = v_u + s (v_c - v_u): the value stays, the gradient is s times that of v_c, which is v unguided."""
    family = FAMILIES[name]()
    policy, batch, unguided = Policy(family.pipe), family.batch(), family.batch(**family.unguided)
    state = policy.roll_out(batch, stop=1).initial
    assert state is not None
    value, both = gradient(policy, batch, state)
    _, conditional = gradient(policy, unguided, state)
    calls = policy.model_calls
    Unconditional(policy, batch)
    assert policy.model_calls == calls
    same, detached = gradient(policy, batch, state)
    assert torch.equal(same, value) and torch.equal(gradient(policy, unguided, state)[1], conditional)
    if name.startswith(RENORMALISED):
        assert (detached - both).norm() > 0.01 * detached.norm()
        return
    scale = float(family.call["guidance_scale"])  # type: ignore[arg-type]
    scale += 1 if name.startswith("z_image") else 0  # v_c + s (v_c - v_u)
    assert (detached - scale * conditional).norm() < 1e-3 * detached.norm()
    assert (detached - both).norm() > 0.1 * detached.norm()


def test_calls_of_their_own_keep_no_graph_and_a_failed_one_leaves_gradients_on() -> None:
    family = FAMILIES["wan_t2v"]()
    policy, batch = Policy(family.pipe), family.batch()
    state = policy.roll_out(batch, stop=1).initial
    assert state is not None
    Unconditional(policy, batch)
    seen: list[bool] = []

    def watched(*_: object) -> None:
        seen.append(torch.is_grad_enabled())
        if len(seen) == 4:
            raise MemoryError("no room")

    policy.denoiser.register_forward_pre_hook(watched)
    policy.advance(batch, state, 0)
    assert seen == [True, False]
    with pytest.raises(MemoryError):
        policy.advance(batch, state, 1)
    assert seen == [True, False, True, False] and torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_without_a_second_prediction(name: str) -> None:
    family = FAMILIES[name]()
    with pytest.raises(ValueError, match="trainer.guidance_in_training: .*makes one prediction per step"):
        Unconditional(Policy(family.pipe), family.batch(**family.unguided))


def test_a_run(folder: Path, model: Path) -> None:
    """Samples and ratios of the first iteration are those of a run that trains both; the gradient is another."""
    result = []
    for guidance in (True, "detached"):
        trainer = {"algorithm": "flow_grpo", "guidance_in_training": guidance}
        changes = {"trainer": trainer, "sampling": {"guidance_scale": 3.0}, "output": str(folder / f"run-{guidance}")}
        config = runs.config(folder, model, **changes, evaluation={"every": 0}, iterations=1)
        result.append(runs.rows(train(config))[-1])
    both, conditional = result
    alike = ("reward/total_mean", "ratio/mean", "ratio/max_abs_dev", "model_calls/sample", "model_calls/train")
    assert {key: both[key] for key in alike} == {key: conditional[key] for key in alike}
    assert conditional["ratio/max_abs_dev"] == 0 and both["grad_norm"] != conditional["grad_norm"] > 0
