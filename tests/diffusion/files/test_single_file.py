"""One .safetensors file on a base pipeline: the same weights, trained like a folder, and what is refused."""

import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Model
from genrl.diffusion.files.export import export
from genrl.diffusion.policy.loading import load_pipeline, loading_code
from genrl.diffusion.train import train
from tests.diffusion import runs


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
    file = save_sd3(trained_elsewhere, tmp_path / "sd3.safetensors", whole=whole)
    settings = Model(path=str(file), config=str(model))
    pipe, base = load_pipeline(settings), DiffusionPipeline.from_pretrained(model)
    made: dict[str, Any] = {"diffusers": diffusers, "torch": torch, "transformers": transformers}
    exec(loading_code(settings), made)  # what the card of an adapter says
    assert type(pipe) is type(base) is type(made["pipe"])
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        source = trained_elsewhere if name == "transformer" or (whole and name == "vae") else base
        expected = getattr(source, name).state_dict()
        for one in (pipe, made["pipe"]):
            actual = getattr(one, name).state_dict()
            assert actual.keys() == expected.keys(), name
            assert all(torch.equal(actual[key], expected[key]) for key in expected), name


def test_what_cannot_be_read_says_why(trained_elsewhere: Any, model: Path, tmp_path: Path) -> None:
    file = save_sd3(trained_elsewhere, tmp_path / "sd3.safetensors", whole=True)
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
    file = save_sd3(trained_elsewhere, tmp_path / "sd3.safetensors", whole=False)
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
        sampled = pipe(**call, guidance_scale=1.0, output_type="latent", generator=torch.Generator().manual_seed(0))
        states.append(sampled.images)
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


# -- Tiny SD3 checkpoints in the format of their authors: one .safetensors file, names and layouts of that time
TRANSFORMER = {
    r"^pos_embed\.pos_embed": "pos_embed",
    r"^pos_embed\.proj": "x_embedder.proj",
    r"^time_text_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
    r"^time_text_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
    r"^time_text_embed\.text_embedder\.linear_1": "y_embedder.mlp.0",
    r"^time_text_embed\.text_embedder\.linear_2": "y_embedder.mlp.2",
    r"^transformer_blocks\.(\d+)\.": r"joint_blocks.\1.",
    r"\.attn\.norm_added_(\w)\.": r".context_block.attn.ln_\1.",
    r"\.attn\.norm_(\w)\.": r".x_block.attn.ln_\1.",
    r"\.attn\.to_add_out\.": ".context_block.attn.proj.",
    r"\.attn\.to_out\.0\.": ".x_block.attn.proj.",
    r"\.norm1\.linear\.": ".x_block.adaLN_modulation.1.",
    r"\.norm1_context\.linear\.": ".context_block.adaLN_modulation.1.",
    r"\.ff\.net\.": ".x_block.mlp.",
    r"\.ff_context\.net\.": ".context_block.mlp.",
    r"\.mlp\.0\.proj\.": ".mlp.fc1.",
    r"_block\.mlp\.2\.": "_block.mlp.fc2.",
    r"^norm_out\.linear": "final_layer.adaLN_modulation.1",
    r"^proj_out": "final_layer.linear",
}
AUTOENCODER = {
    r"conv_norm_out": "norm_out",
    r"mid_block\.resnets\.0": "mid.block_1",
    r"mid_block\.resnets\.1": "mid.block_2",
    r"mid_block\.attentions\.0": "mid.attn_1",
    r"attn_1\.group_norm": "attn_1.norm",
    r"attn_1\.to_([qkv])": r"attn_1.\1",
    r"attn_1\.to_out\.0": "attn_1.proj_out",
    r"encoder\.down_blocks\.(\d)\.resnets\.": r"encoder.down.\1.block.",
    r"encoder\.down_blocks\.(\d)\.downsamplers\.0": r"encoder.down.\1.downsample",
    r"decoder\.up_blocks\.(\d)\.resnets\.": r"decoder.up.\1.block.",
    r"decoder\.up_blocks\.(\d)\.upsamplers\.0": r"decoder.up.\1.upsample",
    r"conv_shortcut": "nin_shortcut",
}


def sd3_transformer(transformer: Any) -> dict[str, Tensor]:
    """Query, key and value in one matrix; scale and shift of the last modulations the other way round."""
    held: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    last = f"transformer_blocks.{transformer.config.num_layers - 1}.norm1_context"
    for name, value in transformer.state_dict().items():
        for before, after in (("to_", "x_block"), ("add_", "context_block")):
            result = re.match(rf"transformer_blocks\.(\d+)\.attn\.{before}([qkv])(?:_proj)?\.(\w+)$", name)
            if result:
                parts.setdefault(f"joint_blocks.{result[1]}.{after}.attn.qkv.{result[3]}", {})[result[2]] = value
                break
        else:
            swapped = name.startswith((last, "norm_out"))
            held[_renamed(name, TRANSFORMER)] = torch.cat(value.chunk(2)[::-1]) if swapped else value
    return held | {name: torch.cat([rows[letter] for letter in "qkv"]) for name, rows in parts.items()}


def kl_autoencoder(vae: Any) -> dict[str, Tensor]:
    """Linear layers of the attention as convolutions; the decoder's blocks counted from the last."""
    held, blocks = {}, len(vae.config.up_block_types)
    for name, value in vae.state_dict().items():
        new = _renamed(name, AUTOENCODER)
        new = re.sub(r"decoder\.up\.(\d)", lambda result: f"decoder.up.{blocks - 1 - int(result[1])}", new)
        held[new] = value[:, :, None, None] if "attn_1" in new and value.ndim == 2 else value
    return held


def save_sd3(pipe: Any, file: Path, *, whole: bool) -> Path:
    """The denoiser alone, as ComfyUI has it, or with the autoencoder; the text encoders are files of their own."""
    held = {f"model.diffusion_model.{name}": value for name, value in sd3_transformer(pipe.transformer).items()}
    if whole:
        held |= {f"first_stage_model.{name}": value for name, value in kl_autoencoder(pipe.vae).items()}
    save_file({name: value.contiguous() for name, value in held.items()}, file)
    return file


def _renamed(name: str, rules: dict[str, str]) -> str:
    for pattern, replacement in rules.items():
        name = re.sub(pattern, replacement, name)
    return name
