"""LoRA files of every program (form x alpha x dtype x damage): each acts as it was trained, or is refused by name."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from genrl.diffusion.policy.adapters import load_lora
from tests.diffusion.families import FAMILIES

TARGETS = ("to_q", "to_out.0")
FORMS = ("diffusers", "no header", "peft", "peft named", "bare", "comfyui", "kohya", "lycoris", "2023")
WITH_SETTINGS = ("diffusers", "peft", "peft named")
WITH_ALPHA = ("bare", "comfyui", "kohya", "lycoris")
RANK = 2
Weights = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def sd3() -> Any:
    return FAMILIES["sd3"]().pipe


@pytest.fixture
def pipe(sd3: Any) -> Iterator[Any]:
    yield sd3
    sd3.unload_lora_weights()


def layers_of(network: nn.Module) -> dict[str, Any]:
    """Also where peft has been: it stands around a layer."""
    ends = tuple(f".{target}" for target in TARGETS)
    return {key: part for key, part in network.named_modules() if key.endswith(ends) and hasattr(part, "in_features")}


def trained(
    network: nn.Module, dtype: torch.dtype = torch.float32, *, dora: bool = False
) -> dict[str, dict[str, Tensor]]:
    source = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return (0.1 + torch.rand(*shape, generator=source)).to(dtype)

    made = {}
    for key, layer in layers_of(network).items():
        made[key] = {"A": noise(RANK, layer.in_features), "B": noise(layer.out_features, RANK)}
        if dora:
            made[key]["m"] = noise(layer.out_features)
    return made


def key_of(form: str, layer: str, part: str) -> str:
    flat, kohyas = layer.replace(".", "_"), form in ("kohya", "lycoris")
    starts = {"peft": "base_model.model.", "peft named": "base_model.model.", "bare": "", "comfyui": "diffusion_model."}
    starts |= {"kohya": "lora_unet_", "lycoris": "lycoris_"}
    named = starts.get(form, "transformer.") + (flat if kohyas else layer)
    if part == "alpha":
        return f"{named}.alpha"
    if kohyas:
        return f"{named}.{ {'A': 'lora_down.weight', 'B': 'lora_up.weight', 'm': 'dora_scale'}[part] }"
    if part == "m":
        return f"{named}.lora_magnitude_vector"
    if form == "2023":
        return f"{named}.lora.{'down' if part == 'A' else 'up'}.weight"
    return f"{named}.lora_{part}{'.default' if form == 'peft named' else ''}.weight"


def write(folder: Path, form: str, weights: Weights, alpha: float | None, *, dora: bool = False) -> Path:
    """A file as a program writes it, with its alpha where the form has one."""
    tensors = {}
    for layer, parts in weights.items():
        for part, value in parts.items():
            tensors[key_of(form, layer, part)] = value[:, None] if form == "kohya" and part == "m" else value
        if alpha is not None and form in WITH_ALPHA:
            tensors[key_of(form, layer, "alpha")] = torch.tensor(alpha)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha or RANK, "target_modules": list(TARGETS)}
    settings |= {"use_dora": True} if dora else {}
    header = {"format": "pt"}
    folder.mkdir(exist_ok=True, parents=True)
    name = "pytorch_lora_weights.safetensors"
    if form == "diffusers":
        header["lora_adapter_metadata"] = json.dumps({f"transformer.{k}": v for k, v in settings.items()})
    if form.startswith("peft"):
        name = "adapter_model.safetensors"
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / name, header)
    return folder / name


def deltas(network: Any, name: str) -> dict[str, Tensor]:
    return {
        key: module.get_delta_weight(name).float()
        for key, module in network.named_modules()
        if name in getattr(module, "lora_A", {})
    }


@pytest.mark.parametrize("form", FORMS)
def test_every_form_acts_as_it_was_trained(pipe: Any, tmp_path: Path, form: str) -> None:
    """From the file, its folder, in every precision; at its own strength, without an alpha at that of its rank."""
    alphas = (None, 1.0, 8.0) if form in WITH_SETTINGS + WITH_ALPHA else (None,)
    for number, (alpha, dtype) in enumerate(product(alphas, (torch.float32, torch.bfloat16, torch.float16))):
        weights = trained(pipe.transformer, dtype)
        file = write(tmp_path / str(number), form, weights, alpha)
        for source in (file, file.parent):
            name = f"a{number}_{source.is_dir()}"
            load_lora(pipe, str(source), name)
            actual = deltas(pipe.transformer, name)
            assert actual.keys() == weights.keys()
            for layer, parts in weights.items():
                wanted = (alpha or RANK) / RANK * parts["B"].float() @ parts["A"].float()
                torch.testing.assert_close(actual[layer], wanted, rtol=1e-5, atol=1e-6)
            pipe.transformer.delete_adapters(name)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "2023"])
def test_magnitudes_of_a_dora_are_read(pipe: Any, tmp_path: Path, form: str) -> None:
    weights = trained(pipe.transformer, dora=True)
    load_lora(pipe, str(write(tmp_path, form, weights, None, dora=True)), "dora")
    for layer, parts in weights.items():
        module: Any = pipe.transformer.get_submodule(layer)
        assert module.use_dora["dora"]
        assert torch.equal(module.lora_magnitude_vector["dora"].weight, parts["m"])


FURTHER = "transformer_blocks.77.attn.to_q"
DAMAGE: dict[str, tuple[str, Callable[[Weights, str], object]]] = {  # what it says, and what is done to a layer
    "half": (r"has no lora_B \(up\)", lambda weights, at: weights[at].pop("B")),
    "another layer": ("of no layer here", lambda weights, at: weights.update({FURTHER: weights.pop(at)})),
    "width": (
        "it is of another model: its layer .* goes from 3 to",
        lambda weights, at: weights[at].update(A=torch.ones(RANK, 3)),
    ),
    "rank": (
        f"by rank {RANK + 1} and {RANK}",
        lambda weights, at: weights[at].update(A=torch.ones(RANK + 1, weights[at]["A"].shape[1])),
    ),
    "nan": ("not finite", lambda weights, at: weights[at]["A"][0, 0].fill_(torch.nan)),
    "no magnitude": ("have no magnitude", lambda weights, at: weights[at].pop("m")),
    "layer": (
        r"lacks 1 of the \d+ layers of the transformer that its settings name",
        lambda weights, at: weights.pop(at),
    ),
}
HALVES = [(form, "half") for form in FORMS[1:]]


@pytest.mark.parametrize(
    ("form", "how"), [*HALVES, *((FORMS[0], how) for how in DAMAGE), *((form, "layer") for form in WITH_SETTINGS[1:])]
)
def test_what_does_not_fit_is_refused_by_name(pipe: Any, tmp_path: Path, form: str, how: str) -> None:
    weights = trained(pipe.transformer, dora=how == "no magnitude")
    says, damage = DAMAGE[how]
    damage(weights, sorted(weights)[1])
    file = write(tmp_path, form, weights, None)
    with pytest.raises(ValueError, match=says):
        load_lora(pipe, str(file), "bad")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("peft_type", "LOHA", "is of a LOHA, which diffusers does not load"),
        ("r", 16, "its settings say rank 16"),
        ("lora_alpha", float("nan"), "finite and not 0"),
        ("r", "2", "its settings say rank '2' of"),
        ("init_lora_weights", "lora_ga", "changed the weights of the model itself"),
        ("use_dora", True, "say use_dora, and the file has no tensors of that"),
        ("modules_to_save", ["proj_out"], "have modules_to_save, of which"),
        ("use_qalora", True, "have use_qalora, of which"),
        ("rank_pattern", ["to_q"], "rank_pattern of its settings is no object"),
    ],
)
def test_settings_that_are_not_of_the_file(pipe: Any, tmp_path: Path, key: str, value: Any, says: str) -> None:
    file = write(tmp_path, "peft", trained(pipe.transformer), 4.0)
    settings = json.loads((tmp_path / "adapter_config.json").read_text()) | {key: value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=says):
        load_lora(pipe, str(file), "bad")


@pytest.mark.parametrize("text", ["{not json", "[1]", ""])
def test_settings_that_cannot_be_read_are_not_left_out(pipe: Any, tmp_path: Path, text: str) -> None:
    """The strength would be lost: 1 here in place of 2."""
    file = write(tmp_path, "peft", trained(pipe.transformer), 4.0)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match="adapter_config.json beside it, which has its strength, holds no JSON object"):
        load_lora(pipe, str(file), "bad")


FOREIGN = {
    "modules_to_save": "base_model.model.proj_out.modules_to_save.weight",
    "bias": "base_model.model.transformer_blocks.0.attn.to_q.bias",
    "embedding": "base_model.model.pos_embed.lora_embedding_A",
    "textual inversion": "clip_l",
    "LoCon": "lora_unet_transformer_blocks_0_attn_to_q.lora_mid.weight",
    "text encoder": "text_encoder.other.lora_A.weight",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_more_a_file_has_is_named(pipe: Any, tmp_path: Path, what: str) -> None:
    file = write(tmp_path, "peft", trained(pipe.transformer), 4.0)
    save_file(load_file(file) | {FOREIGN[what]: torch.ones(2, 2)}, file)
    with pytest.raises(ValueError, match=f"(?s)1 of the 9 tensors.*{re.escape(FOREIGN[what])}"):
        load_lora(pipe, str(file), "bad")


def test_alphas_contradict_no_settings(pipe: Any, tmp_path: Path) -> None:
    file = write(tmp_path, "kohya", trained(pipe.transformer), 8.0)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 4}))
    with pytest.raises(ValueError, match="its settings say alpha 4 of .*, the tensor beside it 8"):
        load_lora(pipe, str(file), "bad")
    (tmp_path / "adapter_config.json").unlink()
    key = next(key for key in load_file(file) if key.endswith(".alpha"))
    save_file(load_file(file) | {key: torch.ones(2)}, file)
    with pytest.raises(ValueError, match=f"{key} holds 2 numbers; an alpha is one"):
        load_lora(pipe, str(file), "bad")


def test_eight_bits_are_read_as_numbers_or_refused(pipe: Any, tmp_path: Path) -> None:
    weights = trained(pipe.transformer, torch.float8_e4m3fn)
    load_lora(pipe, str(write(tmp_path / "fp8", "bare", weights, None)), "fp8")
    for layer, result in deltas(pipe.transformer, "fp8").items():
        torch.testing.assert_close(result, weights[layer]["B"].float() @ weights[layer]["A"].float())
    whole = {layer: {k: (9 * v.float()).to(torch.int8) for k, v in parts.items()} for layer, parts in weights.items()}
    with pytest.raises(ValueError, match="8 of its tensors hold whole numbers, whose scale is not known"):
        load_lora(pipe, str(write(tmp_path / "int8", "bare", whole, 4.0)), "bad")


def test_patterns_and_rslora_of_peft(pipe: Any, tmp_path: Path) -> None:
    """Flow-GRPO's and Flow-Factory's files are peft's; ranks and alphas by layer, and alpha over the root."""
    weights = trained(pipe.transformer)
    file = write(tmp_path, "peft", weights, 4.0)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    settings |= {"alpha_pattern": {"to_q": 6.0}, "use_rslora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    load_lora(pipe, str(file), "peft")
    for layer, actual in deltas(pipe.transformer, "peft").items():
        alpha = 6.0 if layer.endswith("to_q") else 4.0
        wanted = alpha / RANK**0.5 * weights[layer]["B"] @ weights[layer]["A"]
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def test_which_alpha_was_taken_is_said_and_which_file_is_asked(pipe: Any, tmp_path: Path, caplog: Any) -> None:
    weights = trained(pipe.transformer)
    with caplog.at_level(logging.WARNING):
        load_lora(pipe, str(write(tmp_path / "a", "bare", weights, None)), "a")
        load_lora(pipe, str(write(tmp_path / "b", "kohya", weights, 8.0)), "b")
        load_lora(pipe, str(write(tmp_path / "c", "peft", weights, 3.0)), "c")
    assert "rank 2, alpha 2 (no alpha in the file: taken as the rank)" in caplog.text
    assert "rank 2, alpha 8 (its own alphas)" in caplog.text
    assert "rank 2, alpha 3 (its settings)" in caplog.text
    weights = trained(pipe.transformer)
    file = write(tmp_path, "bare", weights, None)
    for name in ("b.safetensors", "c.safetensors"):
        (tmp_path / name).write_bytes(file.read_bytes())
    load_lora(pipe, str(tmp_path), "standard")
    file.unlink()
    with pytest.raises(ValueError, match=r"has 2 files \(b.safetensors, c.safetensors\): give .*/FILE to say which"):
        load_lora(pipe, str(tmp_path), "either")


def test_kohyas_file_of_a_unet_and_its_text_encoder(tmp_path: Path) -> None:
    """Convolutions of 1 x 1 for linear layers, names with and without `text_model`; both networks, or none."""
    pipe: Any = FAMILIES["sd15"]().pipe
    tensors, wanted = {}, {}
    for start, part, ends in (
        ("lora_unet_", pipe.unet, ("attn1.to_q", "proj_in")),
        ("lora_te_", pipe.text_encoder, ("q_proj",)),
    ):
        for key, layer in part.named_modules():
            if not key.endswith(ends):
                continue
            weight = layer.weight.flatten(1)
            name = start + ("text_model_" if part is pipe.text_encoder and "text_model" not in key else "")
            name += key.replace(".", "_")
            down, up = torch.randn(RANK, weight.shape[1], 1, 1), torch.randn(weight.shape[0], RANK, 1, 1)
            tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
            tensors[f"{name}.alpha"] = torch.tensor(1.0)
            wanted[part, key] = 0.5 * up.flatten(1) @ down.flatten(1)
    save_file(tensors, tmp_path / "a.safetensors")
    load_lora(pipe, str(tmp_path), "a")
    for (part, key), delta in wanted.items():
        actual = deltas(part, "a")[key].flatten(1)
        torch.testing.assert_close(actual, delta, rtol=1e-4, atol=1e-5)
    pipe.unload_lora_weights()
    save_file(tensors | {"lora_te2_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight": torch.ones(2, 4)},
              tmp_path / "a.safetensors")  # fmt: skip
    with pytest.raises(ValueError, match="1 of the .* of no layer here"):
        load_lora(pipe, str(tmp_path), "b")


def test_original_names_of_flux_go_through_diffusers_converter(tmp_path: Path) -> None:
    """kohya's files of FLUX have queries, keys and values in one layer: the converter splits it without a loss."""
    pipe: Any = FAMILIES["flux"]().pipe
    width = pipe.transformer.config.num_attention_heads * pipe.transformer.config.attention_head_dim
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    down, up = torch.randn(4, width), torch.randn(3 * width, 4)
    tensors = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "a.safetensors")
    load_lora(pipe, str(tmp_path), "a")
    result = deltas(pipe.transformer, "a")
    rows = torch.cat([result[f"transformer_blocks.0.attn.to_{one}"] for one in "qkv"])
    torch.testing.assert_close(rows, 0.5 * up @ down, rtol=1e-4, atol=1e-5)
    save_file(tensors | {f"{name}.dora_scale": torch.ones(3 * width, 1)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="magnitudes|of no layer"):
        load_lora(pipe, str(tmp_path), "b")
