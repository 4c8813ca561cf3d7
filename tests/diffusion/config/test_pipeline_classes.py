"""What a check says of a pipeline's class, from diffusers' source: as training would, and without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import LCMScheduler

from genrl.config import ConfigError, check_files, load
from genrl.diffusion.config.pipeline_classes import loop_problems, problems
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
    """Every family that is tested as a policy, with a LoRA where diffusers has one; for sounds there are no rewards."""
    family = FAMILIES[name]()
    pipe = family.pipe
    networks = {n: type(c).__name__ for n, c in pipe.components.items() if n in DENOISERS and c is not None}
    kind = type(pipe).__name__
    said = [text for _, text in problems(kind, networks, lora=False)]
    assert len(said) == (family.media == "audio") and all("makes sounds, and the rewards" in text for text in said)
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
    made = [build() for build in FAMILIES.values()]
    assert listed == {type(one.pipe).__name__ for one in made if one.media != "audio"}
