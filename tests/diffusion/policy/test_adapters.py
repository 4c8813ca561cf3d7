"""Adapters of every type: nothing changed at first, replay, files that plain diffusers reads, merging; one to go on
with, frozen ones beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from genrl.config import ConfigError, LoRA
from genrl.diffusion.config.sections import Model
from genrl.diffusion.policy.adapters import activate, load_lora
from genrl.diffusion.policy.export import export, save_lora
from genrl.diffusion.policy.loading import load_pipeline
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.policy.weights import trainable
from genrl.diffusion.train import train
from genrl.runtime.folder import checkpoint
from genrl.runtime.weights.weights import REFERENCE, Weights
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.watched import resumed
from tests.diffusion.policy.tiers import tiered

TYPES = ["lora", "dora", "rslora", "lokr"]
SAMPLING = {"num_inference_steps": 3, "height": 16, "width": 16, "max_sequence_length": 8, "guidance_scale": 1.0}
BATCH = Batch(["a red star", "two blue dogs"], [(7, 0, 0), (7, 0, 1)], SAMPLING)


def made(**keys: Any) -> tuple[Policy, Weights]:
    policy = Policy(FAMILIES["sd3"]().pipe)
    lora = LoRA.model_validate({"rank": 4, "alpha": 8.0} | keys)
    return policy, trainable(policy.denoisers, lora, pipe=policy.pipe)


@torch.no_grad()
def drawn(policy: Policy) -> Tensor:
    return policy.generate(BATCH)


@torch.no_grad()
def move(weights: Weights, seed: int = 0) -> None:
    source = torch.Generator().manual_seed(seed)
    for p in weights.parameters:
        p.add_(0.1 * torch.randn(p.shape, generator=source))


def saved(folder: Path, seed: int = 0, **keys: Any) -> tuple[Policy, Path]:
    policy, weights = made(**keys)
    move(weights, seed)
    save_lora(policy, folder, BATCH)
    return policy, folder


@pytest.mark.parametrize("kind", tiered(TYPES, ("lora", "lokr")))
def test_nothing_changes_at_first_and_replay_is_exact(kind: str) -> None:
    untouched = drawn(Policy(FAMILIES["sd3"]().pipe))
    policy, weights = made(type=kind)
    torch.testing.assert_close(drawn(policy), untouched, rtol=1e-4, atol=1e-5)  # dora divides by a length
    assert {p.dtype for p in weights.parameters} == {torch.float32}
    move(weights)
    with torch.no_grad():
        recorded = policy.roll_out(BATCH, Kernel("flow_sde", 0.7), (0, 1))
    replayed = policy.replay(recorded.step(1))
    assert torch.equal(replayed.log_prob.detach(), recorded.log_probs[1])
    replayed.log_prob.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in weights.parameters)
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in weights.parameters)
    with weights.reference():
        assert torch.equal(drawn(policy), untouched)
    assert not torch.equal(drawn(policy), untouched)


@pytest.mark.parametrize("kind", tiered(TYPES, ("lora", "lokr")))
def test_saved_loaded_by_plain_diffusers_and_merged(tmp_path: Path, kind: str) -> None:
    policy, folder = saved(tmp_path / "lora", type=kind)
    pipe = FAMILIES["sd3"]().pipe
    if kind == "lokr":
        pipe.transformer.load_lora_adapter(str(folder), prefix=None, use_safetensors=True)
    else:
        pipe.load_lora_weights(str(folder))
    loaded = Policy(pipe)
    plain = drawn(loaded)
    assert torch.equal(plain, drawn(policy))
    pipe.fuse_lora(components=["transformer"])
    pipe.transformer.unload_lora()
    torch.testing.assert_close(drawn(loaded), plain, rtol=1e-4, atol=1e-5)


def test_ranks_of_layers_keep_the_scale(tmp_path: Path) -> None:
    policy, weights = made(ranks={"transformer": 6, r"0\.attn\.to_q": 2})
    ranks = {key.split(".lora_A")[0]: p.shape[0] for key, p in weights.named.items() if ".lora_A." in key}
    assert {rank for key, rank in ranks.items() if key.endswith("0.attn.to_q")} == {2}
    assert {rank for key, rank in ranks.items() if not key.endswith("0.attn.to_q")} == {6}
    scales = {m.scaling["default"] for m in policy.denoiser.modules() if hasattr(m, "scaling") and m.scaling}
    assert scales == {2.0}
    move(weights)
    save_lora(policy, tmp_path / "lora", BATCH)
    with pytest.raises(ValueError, match=r"model\.lora\.ranks: no adapted layer's name ends in to_query"):
        made(ranks={"to_query": 2})


def test_goes_on_from_a_file_and_refers_to_it(tmp_path: Path) -> None:
    """From the file alone: rank and alpha are its own. One of another model is refused."""
    first, folder = saved(tmp_path / "lora", rank=2, alpha=6.0, type="dora")
    policy = Policy(FAMILIES["sd3"]().pipe)
    weights = trainable(policy.denoisers, LoRA.model_validate({"from": str(folder)}), pipe=policy.pipe)
    weights.snapshot(REFERENCE)
    config = policy.denoiser.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_dora) == (2, 6, True)
    start = drawn(policy)
    assert torch.equal(start, drawn(first)) and weights.is_lora
    move(weights, 1)
    assert not torch.equal(drawn(policy), start)
    with weights.reference():
        assert torch.equal(drawn(policy), start)
    save_lora(policy, tmp_path / "again", BATCH)
    flux = Policy(FAMILIES["flux"]().pipe)
    with pytest.raises(ValueError, match="is of another model"):
        trainable(flux.denoisers, LoRA.model_validate({"from": str(folder)}), pipe=flux.pipe)


def test_frozen_ones_stay_active_and_as_they_are(tmp_path: Path) -> None:
    """Training one beside two: they act, have no gradient, and are no part of what is saved."""
    _, one = saved(tmp_path / "one", 1)
    _, two = saved(tmp_path / "two", 2, rank=2)
    base = FAMILIES["sd3"]().pipe
    load_lora(base, str(one), "one")
    load_lora(base, str(two), "two")
    base.set_adapters(["one", "two"])
    plain = Policy(base)
    expected = drawn(plain)

    policy, weights = made(frozen=[str(one), str(two)])
    weights.snapshot(REFERENCE)
    assert torch.equal(drawn(policy), expected)
    names = {name for name, p in policy.denoiser.named_parameters() if p.requires_grad}
    assert names == {key.removeprefix("transformer.") for key in weights.named}
    assert all(".default." in name for name in names)
    kept = {n: p.clone() for n, p in policy.denoiser.named_parameters() if ".frozen_" in n}
    assert kept
    move(weights)
    after = drawn(policy)
    assert not torch.equal(after, expected)
    save_lora(policy, tmp_path / "trained", BATCH)
    assert torch.equal(drawn(policy), after)
    assert {name for name, p in policy.denoiser.named_parameters() if p.requires_grad} == names
    assert all(torch.equal(p, kept[n]) for n, p in policy.denoiser.named_parameters() if n in kept)
    with weights.reference():
        assert torch.equal(drawn(policy), expected)

    load_lora(base, str(tmp_path / "trained"), "trained")
    base.set_adapters(["trained", "one", "two"])
    torch.testing.assert_close(drawn(plain), after, rtol=1e-5, atol=1e-5)
    activate(policy.denoiser)
    assert torch.equal(drawn(policy), after)


# -- Adapters of text encoders beside those of the denoiser: trained, switched off for the reference, and loaded again
# by plain diffusers


BOTH = {"text_encoder", "text_encoder_2"}
ENCODERS = {"sd15": {"text_encoder"}, "sdxl": BOTH, "sd3": BOTH, "flux": {"text_encoder"}}
KERNELS = {"sd15": Kernel("ddim", 1.0), "sdxl": Kernel("ddim", 1.0)}
ON: dict[str, Any] = {"model": {"lora": {"rank": 4, "alpha": 8, "text_encoders": True}}}


def moved(family: str) -> tuple[Policy, Weights, Batch]:
    found = FAMILIES[family]()
    policy = Policy(found.pipe, trains_encoders=True)
    weights = trainable(policy.denoisers, LoRA(rank=4, alpha=8.0, text_encoders=True), pipe=policy.pipe)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in weights.parameters:
            p.add_(0.1 * torch.randn(p.shape, generator=source))
    prompts = ["a red star", "two blue dogs", "a red star"]
    return policy, weights, Batch(prompts, [(7, 0, k) for k in range(3)], {**found.call, "num_inference_steps": 3})


@pytest.mark.parametrize("family", tiered(ENCODERS, ("sd15", "sd3")))
def test_replay_gradients_reference_and_file(family: str, tmp_path: Path) -> None:
    """On policy to the bit, with gradients in every encoder; without adapters it is the pipeline that was loaded; plain
    diffusers loads both from the file."""
    policy, weights, batch = moved(family)
    assert {name.partition(".")[0] for name in weights.named} - policy.denoisers.keys() == ENCODERS[family]
    assert all(p.dtype == torch.float32 for p in weights.parameters)
    with torch.no_grad():
        trajectory = policy.roll_out(batch, KERNELS.get(family, Kernel("flow_sde", 0.7)), (0, 1))
    replayed = policy.replay(trajectory.step(1))
    assert torch.equal(replayed.log_prob.detach(), trajectory.log_probs[1])
    replayed.log_prob.sum().backward()  # type: ignore[no-untyped-call]
    for encoder in ENCODERS[family]:
        grads = [p.grad for name, p in weights.named.items() if name.startswith(f"{encoder}.")]
        assert any(grad is not None and bool(grad.abs().max() > 0) for grad in grads)
    plain = Policy(FAMILIES[family]().pipe)
    with torch.no_grad():
        wanted = plain.roll_out(batch, stop=1).final
        assert not torch.equal(policy.roll_out(batch, stop=1).final, wanted)
        with weights.reference():
            assert torch.equal(policy.roll_out(batch, stop=1).final, wanted)
    save_lora(policy, tmp_path, batch.take([0]))
    pipe = FAMILIES[family]().pipe
    load_lora(pipe, str(tmp_path))
    with torch.no_grad():
        found, wanted = Policy(pipe).roll_out(batch).final, policy.roll_out(batch).final
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{"algorithm": "flow_grpo", "kl_weight": 0.01}, {"algorithm": "diffusion_nft"}])
def test_a_run_resumes_to_the_bit(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    """And both networks move."""
    config = runs.config(folder, model, trainer=trainer, **ON)
    run = resumed(config, folder)
    one, two = (checkpoint.load(run / "checkpoints" / f"step-{k:06d}").tensors["weights"] for k in (1, 2))
    changed = {name.partition(".")[0] for name, value in two.items() if not torch.equal(one[name], value)}
    assert changed == {"transformer", "text_encoder", "text_encoder_2"}
    rows = runs.rows(run)[1:]
    assert all(row["updates"] > 0 for row in rows)
    assert rows[0].get("ratio/max_abs_dev", 0.0) == 0.0
    export(run, folder / "whole", full=True)  # it compares what it merged with the run's
    with pytest.raises(ValueError, match="text encoders are adapted, too"):
        export(run, folder / "kohya", form="kohya")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": {**ON["model"], "offload": {"text_encoders": "between"}}}, "encodings change with the adapters"),
        ({"model": {**ON["model"], "encodings": "there"}}, "encodings change with the adapters"),
        ({"model": {"lora": {"rank": 4, "type": "dora", "text_encoders": True}}}, "was not tried with it"),
        ({"model": {**ON["model"], "quantize": "int8"}}, "trained unquantised"),
        ({**ON, "distributed": {"fsdp": True}}, "not held in shards"),
        ({**ON, "trainer": {"algorithm": "flow_grpo", "keep_graph": True}}, "begin behind the text encoders"),
    ],
)
def test_refused(folder: Path, model: Path, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        runs.config(folder, model, **change)


def test_pipelines_without_such_adapters_are_refused() -> None:
    policy = Policy(FAMILIES["lumina2"]().pipe, trains_encoders=True)
    with pytest.raises(ValueError, match="diffusers loads no adapters of a Lumina2Pipeline's text encoders"):
        trainable(policy.denoisers, LoRA(rank=4, text_encoders=True), pipe=policy.pipe)


# -- Quantised bases: the ratio stays 1, a run goes on to the bit, adapters fit the weights as they were published


KINDS = {"int8": "Int8Tensor", "fp8": "Float8Tensor"}


def held(kind: Any, **changes: Any) -> dict[str, Any]:
    """Changes of the tiny run."""
    return {"model": {"quantize": kind}, "iterations": 4, "evaluation": {"every": 2, "num_prompts": 2}, **changes}


def picture(pipe: Any) -> np.ndarray:
    generator = torch.Generator().manual_seed(3)
    call = {"height": 16, "width": 16, "num_inference_steps": 3, "guidance_scale": 1.0, "max_sequence_length": 4}
    return np.asarray(pipe("a red star", generator=generator, output_type="np", **call).images[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_quantised_run_is_on_policy_and_goes_on_to_the_bit(folder: Path, model: Path, kind: str) -> None:
    """The ratio is exactly 1 in the first update of every iteration, and goes on from its checkpoint."""
    straight = resumed(runs.config(folder, model, **held(kind, iterations=3)), folder)
    assert [row["ratio/max_abs_dev"] for row in runs.rows(straight) if row["step"]] == [0.0] * 3
    assert {tensor.dtype for tensor in runs.last_state(straight).tensors["weights"].values()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_quantised(model: Path, kind: str) -> None:
    pipe = load_pipeline(Model(path=str(model), quantize=kind))
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            linear = [m for m in component.modules() if isinstance(m, torch.nn.Linear)]
            kinds = {type(module.weight.data).__name__ for module in linear}
            # transformers leaves the last projection of an encoder as it is
            wanted = {"Tensor"} if name == "vae" else {KINDS[kind]}
            assert kinds == wanted or (name.startswith("text_encoder") and kinds == {"Tensor", KINDS[kind]}), name
    one = load_pipeline(Model(path=str(model), quantize={"transformer": kind}))
    assert type(one.components["text_encoder"].text_model.encoder.layers[0].mlp.fc1.weight.data) is torch.Tensor


def test_the_adapter_fits_the_weights_that_were_published(folder: Path, model: Path) -> None:
    """In plain diffusers; and a full export is the merge into them."""
    run = train(runs.config(folder, model, **held("int8", optimizer={"lr": 0.1}, iterations=2)))
    published = DiffusionPipeline.from_pretrained(model)
    before = picture(published)
    published.load_lora_weights(run / "lora")
    found = picture(published)
    quantised = load_pipeline(Model(path=str(model), quantize="int8"))
    load_lora(quantised, str(run / "lora"))
    change = np.abs(found - before).mean()
    assert change > 1e-3
    assert np.abs(found - picture(quantised)).mean() < 0.2 * change  # what is left is the rounding of the base
    merged = DiffusionPipeline.from_pretrained(export(run, folder / "merged", full=True))
    np.testing.assert_allclose(picture(merged), found, atol=1e-3)
    assert type(merged.transformer.transformer_blocks[0].attn.to_q.weight.data) is torch.Tensor


def test_refused_before_anything_is_loaded(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"model.quantize, model.lora.*cannot be trained, only adapters"):
        runs.config(folder, model, model={"quantize": "int8", "lora": None})
    with pytest.raises(ConfigError, match=r"model.quantize.*no backward pass.*write nf4"):
        runs.config(folder, model, model={"quantize": "int4"})
    with pytest.raises(ConfigError, match=r"model.quantize.vae.*denoisers .* and text encoders"):
        runs.config(folder, model, model={"quantize": {"vae": "int8"}})
    with pytest.raises(ValueError, match=r"model.quantize.text_encoder_4: StableDiffusion3Pipeline has no such"):
        load_pipeline(Model(path=str(model), quantize={"text_encoder_4": "int8"}))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"model.quantize: nf4 .*asks for a GPU.*write int8 or fp8"):
            load_pipeline(Model(path=str(model), quantize="nf4"))
    monkeypatch.setattr("genrl.config.sections.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"model.quantize: int8 .* not installed: pip install torchao"):
        load_pipeline(Model(path=str(model), quantize="int8"))


def test_the_adapter_of_a_quantised_pipeline_without_a_loader_is_saved(folder: Path) -> None:
    """diffusers' own way of saving it casts the denoiser, which a quantised one refuses."""
    family = FAMILIES["ovis_image"]()
    family.pipe.save_pretrained(folder / "ovis")
    own = {key: value for key, value in family.call.items() if key in ("height", "width", "guidance_scale")}
    further = {key: value for key, value in family.call.items() if key not in own}
    tree: dict[str, Any] = {"model": {"quantize": {"transformer": "int8"}}, "iterations": 1, "evaluation": {"every": 0}}
    run = train(runs.config(folder, folder / "ovis", **tree, sampling={**own, "pipeline_args": further}))
    assert runs.rows(run)[-1]["ratio/max_abs_dev"] == 0.0
    plain = FAMILIES["ovis_image"]().pipe
    plain.transformer.load_lora_adapter(str(run / "lora"), prefix=None, use_safetensors=True)
    assert any("lora" in name for name, _ in plain.transformer.named_parameters())
