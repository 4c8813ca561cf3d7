"""Quantised bases: the ratio stays 1, a run goes on to the bit, adapters fit the weights as they were published."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from genrl.diffusion.config.sections import Model
from genrl.diffusion.files.export import export
from genrl.diffusion.policy.adapters import load_lora
from genrl.diffusion.policy.loading import load_pipeline
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.watched import resumed

KINDS = {"int8": "Int8Tensor", "fp8": "Float8Tensor"}


def held(kind: Any, **changes: Any) -> dict[str, Any]:
    return {"model": {"quantize": kind}, "iterations": 4, "evaluation": {"every": 2, "num_prompts": 2}, **changes}


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
    before = runs.picture(published)
    published.load_lora_weights(run / "lora")
    found = runs.picture(published)
    quantised = load_pipeline(Model(path=str(model), quantize="int8"))
    load_lora(quantised, str(run / "lora"))
    change = np.abs(found - before).mean()
    assert change > 1e-3
    assert np.abs(found - runs.picture(quantised)).mean() < 0.2 * change  # what is left is the rounding of the base
    merged = DiffusionPipeline.from_pretrained(export(run, folder / "merged", full=True))
    np.testing.assert_allclose(runs.picture(merged), found, atol=1e-3)
    assert type(merged.transformer.transformer_blocks[0].attn.to_q.weight.data) is torch.Tensor


def test_refused_before_anything_is_loaded(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[tuple[Any, str]] = [({"text_encoder_4": "int8"}, r"text_encoder_4: StableDiffusion3Pipeline has no")]
    if not torch.cuda.is_available():
        refused.append(("nf4", r"model.quantize: nf4 .*asks for a GPU.*write int8 or fp8"))
    for quantize, says in refused:
        with pytest.raises(ValueError, match=says):
            load_pipeline(Model(path=str(model), quantize=quantize))
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
