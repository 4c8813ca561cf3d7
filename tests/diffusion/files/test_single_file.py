"""One .safetensors file on a base pipeline: the same weights, trained like a folder, and what is refused."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Model
from genrl.diffusion.files.export import export
from genrl.diffusion.policy.loading import load_pipeline, loading_code
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


def test_what_cannot_be_read_says_why(trained_elsewhere: Any, model: Path, tmp_path: Path) -> None:
    file = original_format.save_sd3(trained_elsewhere, tmp_path / "sd3.safetensors", whole=True)
    held = load_file(file)
    del held["model.diffusion_model.x_embedder.proj.bias"]
    save_file(held, file)
    with pytest.raises(ValueError, match=r"path: .* could not be loaded on model\.config .*x_embedder\.proj\.bias"):
        load_pipeline(Model(path=str(file), config=str(model)))
    save_file({n: v for n, v in held.items() if "decoder.norm_out" not in n and "diffusion_model" not in n}, file)
    with pytest.raises(ValueError, match=r"model\.path: .* could not be loaded"):
        load_pipeline(Model(path=str(file), config=str(model)))


def test_weights_of_the_file_that_no_layer_has_are_refused_or_named(
    trained_elsewhere: Any, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Further blocks, scales of fp8, a norm that nothing reads; another component's weights are nobody's loss."""
    file = original_format.save_sd3(trained_elsewhere, tmp_path / "sd3.safetensors", whole=False)
    held, settings = load_file(file), Model(path=str(file), config=str(model))
    first = "model.diffusion_model.joint_blocks.0."
    deeper = {k.replace(first, first.replace("0", "9")): v.clone() for k, v in held.items() if k.startswith(first)}
    key = f"{first}x_block.attn.proj.weight"
    for extra, says in (
        (deeper, "numbers that the file has of its transformer are in no layer|another shape|could not be loaded"),
        ({key.replace("weight", "scale_weight"): torch.ones(1)}, "has 1 scales of fp8 weights .*take the file in bf16"),
        ({"model.diffusion_model.scaled_fp8": torch.ones(2)}, "scales of fp8"),
    ):
        save_file(held | extra, file)
        with pytest.raises(ValueError, match=says):
            load_pipeline(settings)
    save_file(held | {"model.diffusion_model.norm_final.weight": torch.ones(8), "text_encoders.a": torch.ones(9)}, file)
    load_pipeline(settings)
    assert "8 of the" in caplog.text and "numbers that the file has of its transformer are in no layer" in caplog.text


@pytest.fixture(scope="module")
def quantised(trained_elsewhere: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its denoiser in llama.cpp's format: what is divisible by a block of 32 in eight bits, else float32."""
    gguf = pytest.importorskip("gguf")
    file = tmp_path_factory.mktemp("gguf") / "sd3-Q8_0.gguf"
    writer = gguf.GGUFWriter(str(file), "sd3")
    for name, tensor in trained_elsewhere.transformer.state_dict().items():
        value = tensor.numpy()
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0 and name.endswith(".weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.slow
def test_adapters_are_trained_on_a_gguf_file(
    quantised: Path, trained_elsewhere: Any, model: Path, folder: Path
) -> None:
    """Ratio 1, resumed to the bit, loaded by the lines of the card, and on weights that are not quantised."""
    brief: dict[str, Any] = {"evaluation": {"every": 0}, "checkpoint": {"every": 1}}
    tree = runs.settings(folder, quantised, **brief)
    tree["model"] |= {"config": str(model), "gradient_checkpointing": True}
    straight = train(Config.model_validate(tree))
    assert [row["ratio/max_abs_dev"] for row in runs.rows(straight)] == [0.0, 0.0]
    stopped = train(Config.model_validate(tree | {"iterations": 1, "output": str(folder / "stopped")}))
    train(Config.model_validate(tree | {"output": str(stopped)}), stopped)
    assert runs.differences(straight, stopped) == []
    settings = Model.model_validate(tree["model"])
    kinds = {type(parameter).__name__ for parameter in load_pipeline(settings).transformer.parameters()}
    assert "GGUFParameter" in kinds
    made: dict[str, Any] = {"diffusers": diffusers, "torch": torch, "transformers": transformers}
    exec(loading_code(settings), made)
    trained_elsewhere.load_lora_weights(straight / "lora", adapter_name="trained")
    call = {"prompt": "a red star", "num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 4}
    states = []  # the autoencoders differ
    made["pipe"].load_lora_weights(straight / "lora")
    for pipe in (made["pipe"], trained_elsewhere):
        drawn = pipe(**call, guidance_scale=1.0, output_type="latent", generator=torch.Generator().manual_seed(0))
        states.append(drawn.images)
    trained_elsewhere.unload_lora_weights()
    torch.testing.assert_close(*states, rtol=0, atol=0.05)  # eight bits


def test_what_a_gguf_file_cannot_do_is_refused(quantised: Path, model: Path, folder: Path) -> None:
    tree = runs.settings(folder, quantised, iterations=1, evaluation={"every": 0})
    tree["model"]["config"] = str(model)
    with pytest.raises(ValueError, match="cannot be divided"):
        Config.model_validate(tree | {"model": tree["model"] | {"offload": {"denoiser": "blocks"}}})
    run = train(Config.model_validate(tree))
    with pytest.raises(ValueError, match="not merged into quantised weights"):
        export(run, folder / "merged", full=True)
