"""What a configuration asks of a model's sizes: layers with adapters, samples computed together; adapters on disk."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel

from genrl import recipes
from genrl.config import ConfigError, LoRA, check_files, dump, load, load_located
from genrl.diffusion.config.estimate import Component, context_problems, layer_problems, plan, published
from genrl.diffusion.config.schema import Config
from tests.diffusion import runs

ROOT = Path(__file__).resolve().parents[3]
VAE = Component("vae", "AutoencoderKL", 0, 0, {}, {"block_out_channels": [1, 1, 1, 1]})


def flux(**settings: Any) -> tuple[Component, ...]:
    plain = {"num_attention_heads": 24, "in_channels": 64, "patch_size": 1, "joint_attention_dim": 4096}
    return Component("transformer", "FluxTransformer2DModel", 0, 0, {}, plain | settings), VAE


def test_samples_that_processes_compute_together() -> None:
    other = Component("transformer", "SD3Transformer2DModel", 0, 0, {}, {}), VAE
    buckets = ["sampling.buckets=[[512,512],[528,496]]", "sampling.height=null", "sampling.width=null"]
    pair = "distributed.context=2"
    for changes, components, wanted in (
        ([pair], flux(), []),
        ([pair, "sampling.width=496", "sampling.height=528"], flux(), ["1023 tokens of a picture"]),
        ([pair, *buckets], flux(), ["1023 tokens"]),
        ([pair, "evaluation.width=496", "evaluation.height=528"], flux(), ["1023 tokens of a picture"]),
        ([pair, "sampling.pipeline_args={max_sequence_length: 77}"], flux(), ["77 tokens of its text"]),
        ([pair], flux(num_attention_heads=3), ["3 heads"]),
        ([pair], other, ["no tokens of a SD3Transformer2DModel"]),
        ([], other, []),
    ):
        texts = list(context_problems(load(ROOT / "configs/diffusion/flux1_dev_24gb.yaml", changes), components))
        assert len(texts) == len(wanted) and all(part in text for part, text in zip(wanted, texts, strict=True))


QUICK = Path("configs/flow_grpo.yaml")
SHAPES = {f"blocks.0.{name}.weight": (8, 8) for name in ("attn.to_q", "attn.to_out.0", "ff")}
TRANSFORMER = Component("transformer", "X", 200, 0, SHAPES | {"blocks.0.norm.weight": (8,)}, {})
ENCODER = Component("text_encoder", "Y", 64, 0, {"layers.0.to_v.weight": (8, 8)}, {})


def test_layers_that_are_not_there() -> None:
    rows: list[tuple[LoRA, dict[str, str]]] = [
        (LoRA(), {}),
        (LoRA(targets=("to_q", "attn.to_out.0", "ff"), ranks={"ff": 2, "transformer": 3}), {}),
        (LoRA(targets=("to_q", "norm")), {"model.lora.targets": "no layer of the transformer (X) is called norm"}),
        (LoRA(targets=("to_v",)), {"model.lora.targets": "is called to_v; its layers end in ff, to_q"}),
        (LoRA(ranks={"ff": 2}), {"model.lora.ranks.ff": "no adapted layer's name ends in ff"}),
        (LoRA(ranks={"unet": 2}), {"model.lora.ranks.unet": "components: transformer; a layer: blocks.0.attn.to_q"}),
    ]
    for lora, wrong in rows:
        result = dict(layer_problems(lora, [ENCODER, TRANSFORMER]))
        assert result.keys() == wrong.keys() and all(wrong[key] in text for key, text in result.items())
    unread = Component("transformer", "X", 0, 0, {}, {}, "no weights")
    assert list(layer_problems(LoRA(targets=("nothing",), ranks={"no": 1}), [unread])) == []  # names are not known


def test_check_knows_what_training_refuses_and_from_stays(root: Path, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(root)
    config, origins = load_located("configs/quickstart.yaml", ["model.lora.ranks={to_x: 2}"])
    with pytest.raises(ConfigError, match=r"model\.lora\.ranks\.to_x.*no adapted layer's name ends in to_x"):
        check_files(config, origins)
    config = load(QUICK, ["model.lora.from=org/lora", "trackers=[]", f"output={tmp_path}/run"])
    (tmp_path / "again.yaml").write_text(dump(config))
    assert "    from: org/lora" in dump(config) and load(tmp_path / "again.yaml") == config
    assert LoRA.model_validate({"from": "org/lora"}).begin == "org/lora"


@pytest.mark.parametrize("own", [{"algorithm": "prdp"}, {"algorithm": "spo", "first": 1}])
def test_a_kernel_of_flows_is_refused_for_a_model_that_predicts_noise(folder: Path, sd: Path, own: Any) -> None:
    sampling = {"num_inference_steps": 4, "pipeline_args": {}}
    with pytest.raises(ConfigError, match="flow_sde is for flow models"):
        check_files(runs.config(folder, sd, trainer={**own, "kernel": "flow_sde"}, sampling=sampling))


@pytest.mark.parametrize("key", ["model.lora.from", "model.lora.frozen.0"])
def test_folders_of_adapters(tmp_path: Path, key: str) -> None:
    def notes(source: object) -> list[str]:
        value = f"model.lora.from={source}" if key.endswith("from") else f"model.lora.frozen=[{source}]"
        return check_files(load(QUICK, [value, "trackers=[]", f"output={tmp_path}/run"]))

    assert any(note.startswith(f"{key}: org/lora is not on this machine") for note in notes("org/lora"))
    (tmp_path / "adapter").mkdir()
    with pytest.raises(ConfigError, match=rf"{key}: .* there is no \.safetensors file"):
        notes(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=f"{key}: no such folder: .*adaptr; did you mean .*adapter"):
        notes(tmp_path / "adaptr")
    (tmp_path / "adapter" / "a.safetensors").touch()
    assert not any(note.startswith(key) for note in notes(tmp_path / "adapter"))


# -- Networks of published pipelines that travel with the package, against their classes and what was published
BILLIONS = {  # of the model cards, and of the sizes of the published files
    "stabilityai/stable-diffusion-xl-base-1.0": {"unet": 2.57, "text_encoder_2": 0.695},
    "stabilityai/stable-diffusion-3.5-medium": {"transformer": 2.47, "text_encoder_3": 4.76},
    "black-forest-labs/FLUX.1-dev": {"transformer": 11.9, "text_encoder_2": 4.76},
    "black-forest-labs/FLUX.2-klein-4B": {"transformer": 3.88, "text_encoder": 4.02},
    "Qwen/Qwen-Image": {"transformer": 20.4, "text_encoder": 8.29},
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": {"transformer": 14.3, "transformer_2": 14.3},
}


def test_every_pipeline_that_a_recipe_names_is_known() -> None:
    named = {str(recipe.values["model"]["path"]) for recipe in recipes.recipes() if "model" in recipe.values}
    hub = {path for path in named if not path.startswith("assets/")}
    assert len(hub) > 10 and not [path for path in hub if not published(path)]
    assert published("org/unknown") == ()


@pytest.mark.parametrize("source", BILLIONS)
def test_sizes_are_those_that_were_published(source: str) -> None:
    counts = {part.name: part.num_parameters / 1e9 for part in published(source)}
    for name, billions in BILLIONS[source].items():
        assert counts[name] == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(("name", "kind"), [("vae", AutoencoderKL), ("transformer", FluxTransformer2DModel)])
def test_shapes_are_those_of_the_class(name: str, kind: type) -> None:
    part = next(part for part in published("black-forest-labs/FLUX.1-dev") if part.name == name)
    with torch.device("meta"):
        made = kind(**{key: value for key, value in part.settings.items() if key != "force_upcast"})
    assert part.shapes == {key: tuple(tensor.shape) for key, tensor in made.state_dict().items()}
    assert part.num_parameters == sum(math.prod(shape) for shape in part.shapes.values())


def test_guidance_is_an_input_before_the_download_and_evaluations_count_the_prompts_there_are() -> None:
    config = load(recipes.find("flux1_dev_flow_grpo").file)
    assert isinstance(config, Config)
    known, unknown = plan(config, published(config.base)), plan(config)
    assert (known.guidance, unknown.guidance) == (1, 2)
    few = plan(config, published(config.base), 8)
    assert few.evaluation_calls * config.evaluation.num_prompts == 8 * known.evaluation_calls
    assert plan(config, (), 10**6).evaluation_calls == unknown.evaluation_calls
