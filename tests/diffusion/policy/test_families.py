"""Every family of diffusers pipelines works as a policy, with no line written for it."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from genrl.config import LoRA
from genrl.diffusion.config.pipeline_classes import problems
from genrl.diffusion.files.export import save_lora
from genrl.diffusion.policy.adapters import denoiser_that_loads, loads_lora, trainable
from genrl.diffusion.policy.loading import check_call_arguments
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel, Trajectory
from genrl.mdp.noise import derive_seed
from tests.diffusion.families import ARCHITECTURES, FAMILIES, REFUSED
from tests.diffusion.tiny_parts import Family
from tests.run_folders import tiered

STOCHASTIC = (0, 1, 2)  # not the last: sigma' = 0 there


def kernel_of(family: Family) -> Kernel:
    return Kernel("flow_sde", 0.7) if family.kind == "flow" else Kernel("ddim", 1.0)


def stock_call(family: Family) -> Tensor:
    """What the untouched pipeline makes from the initial noise of the batch."""
    batch = family.batch()
    generators = [torch.Generator().manual_seed(derive_seed(*key, "initial")) for key in batch.keys]
    arguments = {**batch.sampling, **family.inputs, "output_type": "pt"}
    made = family.pipe(prompt=batch.prompts, generator=generators, **arguments)[0]
    return made if isinstance(made, Tensor) else torch.stack(list(made))


@dataclass
class Tried:
    """A family, its policy, and one stochastic rollout of it."""

    family: Family
    policy: Policy
    batch: Batch
    recorded: Trajectory
    stock: Tensor
    """Pictures of the untouched pipeline."""


NEIGHBOURLY = ("ace_step", "kandinsky5_t2i", "kandinsky5_t2v")
"""These pad texts to the longest of the batch and let the padding count."""
WITHOUT_ADAPTERS = ("pixart_alpha", "pixart_sigma", "cogview3plus", "hunyuan_dit", "prx", "allegro")
"""Diffusers' networks of these take none."""


@pytest.fixture(scope="module", params=tiered(FAMILIES, ARCHITECTURES))
def tried(request: pytest.FixtureRequest) -> Tried:
    family = FAMILIES[request.param]()
    stock = stock_call(family)
    check_call_arguments(family.pipe, ["num_inference_steps", *family.call, *family.inputs])
    policy = Policy(family.pipe)
    for denoiser in policy.denoisers.values():
        denoiser.requires_grad_(True)
    batch = family.batch()
    with torch.no_grad():
        recorded = policy.roll_out(batch, kernel_of(family), STOCHASTIC)
    return Tried(family, policy, batch, recorded, stock)


def reached(policy: Policy) -> float:
    """The share of the denoisers' parameters that a backward pass gave a gradient, which is taken away."""
    parameters = [p for denoiser in policy.denoisers.values() for p in denoiser.parameters()]
    result = sum(p.grad is not None and bool(p.grad.abs().max() > 0) for p in parameters)
    for parameter in parameters:
        parameter.grad = None
    return result / len(parameters)


def test_steps_are_recorded_and_replayed_with_gradients(tried: Tried) -> None:
    """Without another call of the text encoders; stopped after two steps and gone on with, it is the same."""
    policy, recorded = tried.policy, tried.recorded
    assert sorted(recorded.log_probs) == list(STOCHASTIC)
    assert policy.state_shape(tried.batch) == recorded.final.shape
    states = list(recorded.states.values())
    assert all(state.dtype == torch.float32 and state.isfinite().all() for state in states)
    assert states[0].std(dim=tuple(range(1, states[0].ndim))).sub(1).abs().max() < 0.5  # starts as unit noise
    assert not torch.equal(states[0][0], states[0][1])
    if tried.family.kind == "flow":
        sigmas = recorded.sigmas
        assert len(sigmas) == 5 and sigmas[0] > 0.99 and sigmas[-1] == 0
        assert (sigmas.diff() < 0).all()
    components = {n: c for n, c in policy.pipe.components.items() if isinstance(c, nn.Module)}
    encoded: list[object] = []
    encoders = [component for name, component in components.items() if name.startswith("text_encoder")]
    handles = [encoder.register_forward_hook(lambda *_: encoded.append(1)) for encoder in encoders]
    assert handles
    for index, log_prob in recorded.log_probs.items():
        replayed = policy.replay(recorded.step(index))
        assert replayed.log_prob.shape == (2,) and torch.equal(replayed.log_prob, log_prob), f"step {index}"
        replayed.log_prob.sum().backward()
        with torch.no_grad():
            level = recorded.sigmas[index] if tried.family.kind == "epsilon" else replayed.step.sigma
            velocity = policy.velocity(tried.batch, recorded.states[index], level)
            torch.testing.assert_close(velocity, replayed.model_output, rtol=1e-3, atol=1e-4)
    # Some parameters never matter: the last block's text stream, experts that were not chosen.
    assert reached(policy) > 0.7
    for name in components.keys() - policy.denoisers.keys():
        assert not any(p.requires_grad for p in components[name].parameters()), name
    with torch.no_grad():
        first = policy.roll_out(tried.batch, recorded.kernel, STOCHASTIC, stop=2)
        rest = policy.roll_out(tried.batch, recorded.kernel, STOCHASTIC, start=2, state=first.final)
    assert torch.equal(rest.final, recorded.final)
    assert first.log_probs.keys() | rest.log_probs.keys() == recorded.log_probs.keys()
    assert torch.equal(rest.log_probs[2], recorded.log_probs[2])
    for handle in handles:
        handle.remove()
    assert not encoded  # the fixture's rollout has encoded these prompts


def test_gradient_through_two_steps_and_the_decoder(tried: Tried) -> None:
    """Loops go on after a step, and may write into what its graph holds."""
    state = tried.recorded.initial
    for index in (2, 3):
        state = tried.policy.advance(tried.batch, state, index)
    final = tried.recorded.final.clone().requires_grad_(True)
    tried.policy.decode(tried.batch, final, grad=True).square().sum().backward()
    assert final.grad is not None and final.grad.isfinite().all() and final.grad.abs().max() > 0
    assert reached(tried.policy) == 0
    state.square().sum().backward()
    assert reached(tried.policy) > 0


@torch.no_grad()
def test_pictures_are_those_of_the_stock_pipeline(tried: Tried) -> None:
    """Not to the bit: the policy encodes prompt by prompt. An epsilon model's scheduler is replaced by DDIM."""
    decoded = tried.policy.decode(tried.batch, tried.recorded.final)
    assert decoded.shape == tried.stock.shape
    assert decoded.dtype == torch.float32 and decoded.isfinite().all()
    low = -1.0 if tried.family.media == "audio" else 0.0
    assert decoded.min() >= low and decoded.max() <= 1.0
    channels = {"image": (4, 1), "video": (5, 2)}.get(tried.family.media)
    if channels is not None:
        assert decoded.ndim == channels[0] and decoded.shape[channels[1]] == 3
    rolled = tried.policy.roll_out(tried.batch)
    assert not rolled.log_probs and not rolled.states
    finals = [tried.policy.generate(tried.batch)] if tried.family.kind == "flow" else []
    scheduler = type(tried.policy.original_scheduler).__name__
    if scheduler in ("FlowMatchEulerDiscreteScheduler", "CogVideoXDDIMScheduler"):  # first order: the same steps
        finals.append(rolled.final)
    for final in finals:
        decoded = tried.policy.decode(tried.batch, final)
        torch.testing.assert_close(decoded, tried.stock.float(), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_sample_depends_on_its_prompt_and_noise_level_alone(tried: Tried) -> None:
    policy, recorded = tried.policy, tried.recorded
    other = policy.roll_out(replace(tried.batch, prompts=tried.batch.prompts[::-1]), recorded.kernel, STOCHASTIC)
    assert ((other.final - recorded.final).flatten(1).abs().amax(dim=1) > 0).all()
    if tried.family.name in NEIGHBOURLY:
        return
    alone = policy.roll_out(tried.batch.take([1]), recorded.kernel, STOCHASTIC)
    torch.testing.assert_close(alone.final[0], recorded.final[1], rtol=1e-3, atol=1e-4)
    state = recorded.states[1]
    levels = torch.tensor([0.7, 0.3]) if tried.family.kind == "flow" else torch.tensor([700, 300])
    for changes in (tried.family.unguided, {}):
        batch = tried.family.batch(**changes)
        both = policy.velocity(batch, state, levels)
        each = [policy.velocity(batch, state, level) for level in levels]
        assert both.shape == recorded.final.shape and both.dtype == torch.float32
        assert not torch.equal(each[0], each[1])
        for row in range(2):
            torch.testing.assert_close(both[row], each[row][row], rtol=1e-3, atol=1e-4)


def to_bfloat16(family: Family) -> None:
    """As `from_pretrained(dtype=torch.bfloat16)` leaves it: some networks keep modules in float32."""
    family.pipe.to(torch.bfloat16)
    for component in family.pipe.components.values():
        kept = getattr(component, "_keep_in_fp32_modules", None) or []
        for name, parameter in component.named_parameters() if kept else []:
            if any(part in name.split(".") for part in kept):
                parameter.data = parameter.data.float()


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("name", tiered(FAMILIES, ("sd15", "sd3", "wan22")))
def test_half_precision(name: str, autocast: torch.dtype | None) -> None:
    family = FAMILIES[name]()
    if autocast is None:
        if name in ("z_image_img2img", "z_image_inpaint"):
            pytest.skip("diffusers' own loop asserts states in float32: autocast it is")
        to_bfloat16(family)
    policy, batch, kernel = Policy(family.pipe, autocast=autocast), family.batch(), kernel_of(family)
    with torch.no_grad():
        recorded = policy.roll_out(batch, kernel, STOCHASTIC)
        rest = policy.roll_out(batch, kernel, STOCHASTIC, start=2, state=recorded.states[2])
        assert recorded.final.dtype == torch.float32
        assert torch.equal(rest.final, recorded.final)
        for index, log_prob in recorded.log_probs.items():
            assert torch.equal(policy.replay(recorded.step(index)).log_prob, log_prob), f"step {index}"
        assert policy.decode(batch, recorded.final).isfinite().all()


@pytest.mark.parametrize("name", tiered([name for name in FAMILIES if name not in WITHOUT_ADAPTERS], ARCHITECTURES))
def test_adapter(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]()
    policy, batch, kernel = Policy(family.pipe), family.batch(), kernel_of(family)
    weights = trainable(policy.denoisers, LoRA(rank=2, alpha=4.0))
    with torch.no_grad():
        for parameter in weights.parameters:  # its second half starts at zero
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
        recorded = policy.roll_out(batch, kernel, STOCHASTIC)
    for index, log_prob in recorded.log_probs.items():
        replayed = policy.replay(recorded.step(index)).log_prob
        assert torch.equal(replayed, log_prob), f"step {index}"
        replayed.sum().backward()
    assert sum(p.grad is not None and bool(p.grad.abs().max() > 0) for p in weights.parameters) > (
        0.7 * len(weights.parameters)
    )
    with torch.no_grad(), weights.reference():
        assert not torch.equal(policy.replay(recorded.step(1)).log_prob, recorded.log_probs[1])
    save_lora(policy, tmp_path / "lora", batch)  # reloads it by diffusers, and compares
    assert (denoiser_that_loads(tmp_path / "lora") is None) == loads_lora(policy.pipe, policy.denoisers)


@pytest.mark.parametrize("name", WITHOUT_ADAPTERS)
def test_no_adapter(name: str) -> None:
    policy = Policy(FAMILIES[name]().pipe)
    network = type(policy.denoiser).__name__
    with pytest.raises(ValueError, match=f"no adapters for a {network}; set model.lora=null"):
        trainable(policy.denoisers, LoRA())
    ((key, text),) = problems(type(policy.pipe).__name__, {"transformer": network}, lora=True)
    assert key == "model.lora" and f"no adapters for a {network}" in text


REASONS = {
    "ltx_i2v": "not all of them are denoised",
    "chroma_inpaint": "ChromaInpaintPipeline cannot be called so.*guidance_embeds",
    "sd_latent_upscaler": "StableDiffusionLatentUpscalePipeline cannot be called so.*no attribute 'sigmas'",
}


@pytest.mark.parametrize("name", REASONS)
def test_refused_with_the_reason(name: str) -> None:
    family = REFUSED[name]()
    with pytest.raises(ValueError, match=REASONS[name]):
        Policy(family.pipe).roll_out(family.batch(), kernel_of(family), STOCHASTIC)
