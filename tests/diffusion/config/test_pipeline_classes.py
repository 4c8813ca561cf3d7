"""What a check says of a pipeline's class, from diffusers' source: as training would, and without torch."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel, LCMScheduler

from genrl import recipes
from genrl.config import ConfigError, LoRA, check_files, dump, load, load_located
from genrl.diffusion.config.estimate import Component, context_problems, layer_problems, plan
from genrl.diffusion.config.memory_estimate import memory
from genrl.diffusion.config.pipeline_classes import loop_problems, problems
from genrl.diffusion.config.published import published
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.policy import Policy
from tests.diffusion.families import FAMILIES, REFUSED

DENOISERS = ("transformer", "transformer_2", "unet")


def config(folder: Path, lora: str = "null", **sampling: int) -> Path:
    (folder / "train.txt").write_text("a cat\n" * 9)
    (folder / "reward.py").write_text("def bright(images):\n    return images.mean(dim=(1, 2, 3))\n")
    path = folder / "run.yaml"
    path.write_text(
        f"model: {{path: {folder / 'model'}, lora: {lora}}}\nprompts: {{train: {folder / 'train.txt'}}}\n"
        f"rewards: [{{name: '{folder / 'reward.py'}:bright'}}]\nevaluation: {{every: 0}}\n"
        f"trainer: {{algorithm: diffusion_nft}}\nsampling: {json.dumps(sampling)}\noptimizer: {{lr: 1e-5}}\n"
    )
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_what_trains_passes(name: str, tmp_path: Path) -> None:
    """Every family that is tested as a policy, with a LoRA where diffusers has one."""
    family = FAMILIES[name]()
    pipe = family.pipe
    networks = {n: type(c).__name__ for n, c in pipe.components.items() if n in DENOISERS and c is not None}
    kind = type(pipe).__name__
    assert list(problems(kind, networks, lora=False)) == []
    assert list(loop_problems(kind, is_flow=family.kind == "flow", branches=False)) == []


LOOPS = {
    "ltx_i2v": "LTXImageToVideoPipeline denoises only part of its latents",
    "sd_latent_upscaler": "StableDiffusionLatentUpscalePipeline reads `sigmas` of its scheduler, which DDIM",
    "chroma_inpaint": "ChromaInpaintPipeline fails in diffusers itself",
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_do_not_fit(name: str, tmp_path: Path) -> None:
    pipe = REFUSED[name]().pipe
    pipe.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"model.path: {LOOPS[name]}"):
        check_files(load(config(tmp_path)))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Kandinsky5I2VPipeline", "denoises only part of its latents"),  # later frames alone
        ("Kandinsky5T2VPipeline", None),
        ("StableDiffusionLatentUpscalePipeline", None),  # its scheduler alone is refused
        ("LTX2Pipeline", "only self.scheduler is the policy"),
        ("SkyReelsV2DiffusionForcingPipeline", "only self.scheduler is the policy"),
        ("Cosmos2TextToImagePipeline", "adds noise of any size to its latents"),
        ("CosmosTextToWorldPipeline", "adds noise of any size to its latents"),
        ("StableDiffusionAdapterPipeline", "decodes to arrays of numpy"),
        ("StableDiffusionXLAdapterPipeline", None),
    ],
)
def test_loops_by_their_source(kind: str, reason: str | None) -> None:
    found = list(loop_problems(kind, is_flow=True, branches=False))
    assert [key for key, _ in found] == (["model.path"] if reason else [])
    assert all(reason in text for _, text in found)


@pytest.mark.parametrize(
    ("kind", "networks", "reason"),
    [
        ("BriaPipeline", {"transformer": "BriaTransformer2DModel"}, None),  # only the network loads it
        ("Kandinsky3Pipeline", {"unet": "Kandinsky3UNet"}, "no adapters for a Kandinsky3UNet"),
        ("NobodysPipeline", {}, None),  # left to loading
    ],
)
def test_loras_by_the_class(kind: str, networks: dict[str, str], reason: str | None) -> None:
    found = list(problems(kind, networks, lora=True))
    assert [key for key, _ in found] == (["model.lora"] if reason else [])
    assert all(reason in text for _, text in found)


def test_a_vae_that_decodes_one_video_at_a_time(tmp_path: Path) -> None:
    FAMILIES["hunyuan_video15"]().pipe.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="model.slice_vae: AutoencoderKLHunyuanVideo15 decodes one video at a time"):
        check_files(load(config(tmp_path)))
    check_files(load(config(tmp_path), ["model.slice_vae=true"]))


def test_a_vae_that_decodes_in_tiles_alone(tmp_path: Path) -> None:
    FAMILIES["allegro"]().pipe.save_pretrained(tmp_path / "model")
    ddim = ["trainer={algorithm: flow_grpo, kernel: ddim, noise_level: 1}"]
    path, kept = config(tmp_path), [*ddim, "model.slice_vae=true", "model.tile_vae=true"]
    check_files(load(path, kept))
    check_files(load(path, [*kept, "sampling.height=144", "sampling.width=176", "sampling.num_frames=40"]))
    with pytest.raises(ConfigError, match="model.tile_vae: AutoencoderKLAllegro decodes in tiles only"):
        check_files(load(path, ddim))
    with pytest.raises(ConfigError, match="sampling.width: its VAE decodes tiles of 128 .*; write 176 for 160"):
        check_files(load(path, [*kept, "sampling.width=160"]))
    with pytest.raises(ConfigError, match="sampling.num_frames: its VAE .*; write 24 for 8"):
        check_files(load(path, [*kept, "sampling.num_frames=8"]))


@pytest.mark.parametrize("trainer", ["{algorithm: flow_grpo, tree: {ways: 2, at: [0]}}", "{algorithm: spo, first: 1}"])
def test_inpainting_does_not_branch(trainer: str, tmp_path: Path) -> None:
    FAMILIES["flux_inpaint"]().pipe.save_pretrained(tmp_path / "model")
    path = config(tmp_path, num_inference_steps=6)
    strong = ["sampling.pipeline_args.strength=1"]
    check_files(load(path, [*strong, "trainer={algorithm: flow_grpo}"]))
    with pytest.raises(ConfigError, match="trainer: samples of a FluxInpaintPipeline cannot branch"):
        check_files(load(path, [*strong, f"trainer={trainer}"]))


def test_sides_that_the_pipeline_cannot_draw(tmp_path: Path) -> None:
    FAMILIES["sd3"]().pipe.save_pretrained(tmp_path / "model")
    check_files(load(config(tmp_path, height=16, width=32)))
    with pytest.raises(ConfigError, match=r"sampling\.height: this pipeline draws sides that are multiples of \d+"):
        check_files(load(config(tmp_path, height=7)))


def test_no_torch_is_imported() -> None:
    text = (
        "import sys; from genrl.diffusion.config.pipeline_classes import source_of; source = source_of('FluxPipeline')"
    )
    text += "; assert source.methods and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True)


NO_POLICY = [
    ("StableCascadePriorPipeline", "prior", "StableCascadeUNet", "no denoiser"),
    ("KandinskyV22CombinedPipeline", "unet", "UNet2DConditionModel", "no `encode_prompt`"),
    ("OmniGenPipeline", "transformer", "OmniGenTransformer2DModel", "no `encode_prompt`"),
    ("DiTPipeline", "transformer", "DiTTransformer2DModel", "DiTPipeline draws without a prompt"),
    ("MarigoldDepthPipeline", "unet", "UNet2DConditionModel", "MarigoldDepthPipeline draws without a prompt"),
]


@pytest.mark.parametrize(("kind", "component", "network", "reason"), NO_POLICY)
def test_what_no_policy_can_be_made_of(kind: str, component: str, network: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    index = {"_class_name": kind, component: ["diffusers", network]}
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"model.path: .*{reason}"):
        check_files(load(config(tmp_path)))


def test_a_consistency_model_is_refused(tmp_path: Path) -> None:
    family = FAMILIES["sd15"]()
    family.pipe.scheduler = LCMScheduler.from_config(family.pipe.scheduler.config)
    family.pipe.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model.path: its scheduler is a LCMScheduler: a consistency model jumps"):
        check_files(load(config(tmp_path)))
    with pytest.raises(ValueError, match="its scheduler is a LCMScheduler: a consistency model jumps"):
        Policy(family.pipe)


def test_the_page_lists_the_classes_that_are_tested() -> None:
    page = Path(__file__).parents[3] / "docs" / "pipelines.md"
    _, _, rest = page.read_text().partition("<!-- tested classes -->")
    listed = set(re.findall(r"`(\w+)`", rest.partition("<!-- end -->")[0]))
    assert listed == {type(build().pipe).__name__ for build in FAMILIES.values()}


# -- Networks of published pipelines that travel with the package, against their classes and what was published


BILLIONS = {  # of the model cards, and of the sizes of the published files
    "stable-diffusion-v1-5/stable-diffusion-v1-5": {"unet": 0.86, "safety_checker": 0.304},
    "stabilityai/stable-diffusion-xl-base-1.0": {"unet": 2.57, "text_encoder_2": 0.695},
    "stabilityai/stable-diffusion-3.5-medium": {"transformer": 2.47, "text_encoder_3": 4.76},
    "stabilityai/stable-diffusion-3.5-large-turbo": {"transformer": 8.1},
    "black-forest-labs/FLUX.1-dev": {"transformer": 11.9, "text_encoder_2": 4.76},
    "black-forest-labs/FLUX.2-klein-4B": {"transformer": 3.88, "text_encoder": 4.02},
    "Qwen/Qwen-Image": {"transformer": 20.4, "text_encoder": 8.29},
    "Tongyi-MAI/Z-Image-Turbo": {"transformer": 6.15},
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {"transformer": 1.42, "text_encoder": 5.68, "vae": 0.127},
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


def test_the_estimate_is_the_one_of_the_whole_model(root: Path) -> None:
    """Part by part that of folders with headers of all weights, which benchmarks/flux_memory.py had made."""
    measured = json.loads((root / "benchmarks/results/flux_memory.json").read_text())["found"]
    for recipe in ("flux1_dev_flow_grpo", "flux1_dev_24gb"):
        config = load(recipes.find(recipe).file)
        assert isinstance(config, Config)
        found = sum(size for _, size in memory(config, published(config.base)))
        assert found == pytest.approx(sum(measured[recipe].values()), rel=0.01), recipe


def test_guidance_is_an_input_before_the_download_and_evaluations_count_the_prompts_there_are() -> None:
    config = load(recipes.find("flux1_dev_flow_grpo").file)
    assert isinstance(config, Config)
    known, unknown = plan(config, published(config.base)), plan(config)
    assert (known.guidance, unknown.guidance) == (1, 2)
    few = plan(config, published(config.base), 8)
    assert few.evaluation_calls * config.evaluation.num_prompts == 8 * known.evaluation_calls
    assert plan(config, (), 10**6).evaluation_calls == unknown.evaluation_calls


# -- Which samples several processes can compute together, by the sizes that a configuration names


ROOT = Path(__file__).resolve().parents[3]
VAE = Component("vae", "AutoencoderKL", 0, 0, {}, {"block_out_channels": [1, 1, 1, 1]})


def flux(**settings: Any) -> tuple[Component, ...]:
    plain = {"num_attention_heads": 24, "in_channels": 64, "patch_size": 1, "joint_attention_dim": 4096}
    return Component("transformer", "FluxTransformer2DModel", 0, 0, {}, plain | settings), VAE


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ([], []),
        (["sampling.width=496", "sampling.height=528"], ["1023 tokens of a picture"]),
        (["sampling.buckets=[[512,512],[528,496]]", "sampling.height=null", "sampling.width=null"], ["1023 tokens"]),
        (["evaluation.width=496", "evaluation.height=528"], ["1023 tokens of a picture"]),
        (["sampling.pipeline_args={max_sequence_length: 77}"], ["77 tokens of its text"]),
    ],
)
def test_tokens(changes: list[str], found: list[str]) -> None:
    config = load(ROOT / "configs/diffusion/flux1_dev_24gb.yaml", ["distributed.context=2", *changes])
    texts = list(context_problems(config, flux()))
    assert len(texts) == len(found) and all(part in text for part, text in zip(found, texts, strict=True))


def test_heads_and_classes() -> None:
    config = load(ROOT / "configs/diffusion/flux1_dev_24gb.yaml", ["distributed.context=2"])
    assert ["3 heads" in text for text in context_problems(config, flux(num_attention_heads=3))] == [True]
    other = Component("transformer", "SD3Transformer2DModel", 0, 0, {}, {})
    assert ["no tokens of a SD3Transformer2DModel" in text for text in context_problems(config, (other, VAE))] == [True]
    alone = load(ROOT / "configs/diffusion/flux1_dev_24gb.yaml")
    assert list(context_problems(alone, (other, VAE))) == []


# -- Adapters of a configuration: how `from` is written, what the disk tells, layers and ranks against the pipeline's


QUICK = Path("configs/flow_grpo.yaml")
SHAPES = {f"blocks.0.{name}.weight": (8, 8) for name in ("attn.to_q", "attn.to_out.0", "ff")}
TRANSFORMER = Component("transformer", "X", 200, 0, SHAPES | {"blocks.0.norm.weight": (8,)}, {})
ENCODER = Component("text_encoder", "Y", 64, 0, {"layers.0.to_v.weight": (8, 8)}, {})


@pytest.mark.parametrize(
    ("lora", "wrong"),
    [
        (LoRA(), {}),
        (LoRA(targets=("to_q", "attn.to_out.0", "ff"), ranks={"ff": 2, "transformer": 3}), {}),
        (LoRA(targets=("to_q", "norm")), {"model.lora.targets": "no layer of the transformer (X) is called norm"}),
        (LoRA(targets=("to_v",)), {"model.lora.targets": "is called to_v; its layers end in ff, to_q"}),
        (LoRA(ranks={"ff": 2}), {"model.lora.ranks.ff": "no adapted layer's name ends in ff"}),
        (LoRA(ranks={"unet": 2}), {"model.lora.ranks.unet": "components: transformer; a layer: blocks.0.attn.to_q"}),
    ],
)
def test_layers_that_are_not_there(lora: LoRA, wrong: dict[str, str]) -> None:
    found = dict(layer_problems(lora, [ENCODER, TRANSFORMER]))
    assert found.keys() == wrong.keys() and all(wrong[key] in text for key, text in found.items())
    unread = Component("transformer", "X", 0, 0, {}, {}, "no weights")
    assert list(layer_problems(LoRA(targets=("nothing",), ranks={"no": 1}), [unread])) == []  # names are not known


def test_check_knows_what_training_refuses(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    config, origins = load_located("configs/quickstart.yaml", ["model.lora.ranks={to_x: 2}"])
    with pytest.raises(ConfigError, match=r"model\.lora\.ranks\.to_x.*no adapted layer's name ends in to_x"):
        check_files(config, origins)


def test_from_survives_a_file(tmp_path: Path) -> None:
    config = load(QUICK, ["model.lora.from=org/lora", "trackers=[]", f"output={tmp_path}/run"])
    (tmp_path / "again.yaml").write_text(dump(config))
    assert "    from: org/lora" in dump(config) and load(tmp_path / "again.yaml") == config
    assert LoRA.model_validate({"from": "org/lora"}).begin == "org/lora"


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
