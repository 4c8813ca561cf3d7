"""One .safetensors file on a base pipeline: the same weights, trained like a folder, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from genrl.config import Config, Model
from genrl.diffusion.policy.loading import load_pipeline
from genrl.diffusion.policy.single_file import loading_code
from genrl.diffusion.train import train
from tests.diffusion import original_format, runs


@pytest.fixture(scope="module")
def trained_elsewhere(model: Path) -> Any:
    """The pipeline of `model` with other weights, as somebody's fine-tune of it is."""
    pipe = DiffusionPipeline.from_pretrained(model)
    torch.manual_seed(1)
    for component in (pipe.transformer, pipe.vae):
        for parameter in component.parameters():
            parameter.data += 0.01 * torch.randn(parameter.shape)
    return pipe


@pytest.mark.parametrize("whole", [False, True])
def test_the_weights_are_those_of_the_file_and_the_rest_of_the_base(
    trained_elsewhere: Any, model: Path, tmp_path: Path, whole: bool
) -> None:
    file = original_format.save_sd3(trained_elsewhere, tmp_path / "sd3.safetensors", whole=whole)
    settings = Model(path=str(file), config=str(model))
    pipe, base = load_pipeline(settings), DiffusionPipeline.from_pretrained(model)
    made: dict[str, Any] = {"diffusers": diffusers, "torch": torch, "transformers": transformers}
    exec(loading_code(settings), made)  # what the card of an adapter says
    assert type(pipe) is type(base) is type(made["pipe"])
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        source = trained_elsewhere if name == "transformer" or (whole and name == "vae") else base
        expected = getattr(source, name).state_dict()
        for one in (pipe, made["pipe"]):
            found = getattr(one, name).state_dict()
            assert found.keys() == expected.keys(), name
            assert all(torch.equal(found[key], expected[key]) for key in expected), name


def test_it_is_trained_like_a_folder(trained_elsewhere: Any, model: Path, folder: Path) -> None:
    file = original_format.save_sd3(trained_elsewhere, folder / "sd3.safetensors", whole=False)
    brief: dict[str, Any] = {"evaluation": {"every": 0}, "iterations": 1}
    tree = runs.settings(folder, file, **brief)
    tree["model"]["config"] = str(model)
    run = train(Config.model_validate(tree))
    whole = folder / "pipeline"
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.transformer.load_state_dict(trained_elsewhere.transformer.state_dict())
    pipe.save_pretrained(whole)
    same = train(runs.config(folder, whole, **brief, output=str(folder / "same")))
    weights = [load_file(one / "lora" / "pytorch_lora_weights.safetensors") for one in (run, same)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] | weights[1])
    card = (run / "lora" / "README.md").read_text(encoding="utf-8")
    assert loading_code(Model(path=str(file), config=str(model))) in card
    assert f"base_model: {json.dumps(str(model))}" in card


def test_what_cannot_be_read_says_why(trained_elsewhere: Any, model: Path, tmp_path: Path) -> None:
    file = original_format.save_sd3(trained_elsewhere, tmp_path / "sd3.safetensors", whole=True)
    held = load_file(file)
    del held["model.diffusion_model.x_embedder.proj.bias"]
    save_file(held, file)
    with pytest.raises(
        ValueError, match=r"model\.path: .* could not be loaded on model\.config .*x_embedder\.proj\.bias"
    ):
        load_pipeline(Model(path=str(file), config=str(model)))
    lacking = {n: v for n, v in held.items() if "final_layer" not in n and "decoder.norm_out" not in n}
    save_file({name: value for name, value in lacking.items() if "diffusion_model" not in name}, file)
    with pytest.raises(ValueError, match=r"model\.path: .* could not be loaded"):
        load_pipeline(Model(path=str(file), config=str(model)))
