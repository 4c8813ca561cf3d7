"""What a check says of a pipeline's class, from diffusers' source: as training would, and without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from genrl.config import ConfigError, check_files, load
from genrl.diffusion.config.pipeline_classes import loop_problems, problems
from tests.diffusion.families import FAMILIES, REFUSED, saved

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
def test_what_trains_passes(name: str) -> None:
    """Every family that is tested as a policy, with a LoRA where diffusers has one; for sounds there are no rewards."""
    family = FAMILIES[name]()
    kind, parts = type(family.pipe).__name__, family.pipe.components.items()
    networks = {n: type(c).__name__ for n, c in parts if n in DENOISERS and c is not None}
    said = [text for _, text in problems(kind, networks, lora=False)]
    assert len(said) == (family.media == "audio") and all("makes sounds, and the rewards" in text for text in said)
    assert list(loop_problems(kind, is_flow=family.kind == "flow", branches=False)) == []


def test_a_loop_that_does_not_fit(tmp_path: Path) -> None:
    """By its scheduler, which stands in the folder."""
    REFUSED["sd_latent_upscaler"]().pipe.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="model.path: .*UpscalePipeline reads `sigmas` of its scheduler, which DDIM"):
        check_files(load(config(tmp_path)))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Kandinsky5I2VPipeline", "denoises only part of its latents"),  # later frames alone
        ("Kandinsky5T2VPipeline", None),
        ("ChromaInpaintPipeline", "fails in diffusers itself"),
        ("StableDiffusionLatentUpscalePipeline", None),  # its scheduler alone is refused
        ("LTX2Pipeline", "only self.scheduler is the policy"),
        ("CosmosTextToWorldPipeline", "adds noise of any size to its latents"),
        ("StableDiffusionAdapterPipeline", "decodes to arrays of numpy"),
        ("StableDiffusionXLAdapterPipeline", None),
    ],
)
def test_loops_by_their_source(kind: str, reason: str | None) -> None:
    result = list(loop_problems(kind, is_flow=True, branches=False))
    assert [key for key, _ in result] == (["model.path"] if reason else [])
    assert all(reason in text for _, text in result)


def test_loras_by_the_class() -> None:
    """Only the network of Bria's loads them; a class that nobody knows is left to loading."""
    assert not list(problems("BriaPipeline", {"transformer": "BriaTransformer2DModel"}, lora=True))
    assert not list(problems("NobodysPipeline", {}, lora=True))
    ((key, text),) = problems("Kandinsky3Pipeline", {"unet": "Kandinsky3UNet"}, lora=True)
    assert key == "model.lora" and "no adapters for a Kandinsky3UNet" in text


def test_a_vae_that_decodes_one_video_at_a_time_or_in_tiles_alone(tmp_path: Path) -> None:
    saved("hunyuan_video15", tmp_path).rename(tmp_path / "model")
    path = config(tmp_path)
    with pytest.raises(ConfigError, match="model.slice_vae: AutoencoderKLHunyuanVideo15 decodes one video at a time"):
        check_files(load(path))
    check_files(load(path, ["model.slice_vae=true"]))
    ddim = [f"model.path={saved('allegro', tmp_path)}", "trainer={algorithm: flow_grpo, kernel: ddim, noise_level: 1}"]
    kept = [*ddim, "model.slice_vae=true", "model.tile_vae=true"]
    check_files(load(path, kept))
    check_files(load(path, [*kept, "sampling.height=144", "sampling.width=176", "sampling.num_frames=40"]))
    for changes, says in (
        (ddim, "model.tile_vae: AutoencoderKLAllegro decodes in tiles only"),
        ([*kept, "sampling.width=160"], "sampling.width: its VAE decodes tiles of 128 .*; write 176 for 160"),
        ([*kept, "sampling.num_frames=8"], "sampling.num_frames: its VAE .*; write 24 for 8"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_files(load(path, changes))


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
    text = "import sys; from genrl.diffusion.config.pipeline_classes import source_of"
    text += "; assert source_of('FluxPipeline').methods and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True)


NO_POLICY = [
    ("StableCascadePriorPipeline", "prior", "StableCascadeUNet", "no denoiser"),
    ("OmniGenPipeline", "transformer", "OmniGenTransformer2DModel", "no `encode_prompt`"),
    ("DiTPipeline", "transformer", "DiTTransformer2DModel", "DiTPipeline draws without a prompt"),
]


@pytest.mark.parametrize(("kind", "component", "network", "reason"), NO_POLICY)
def test_what_no_policy_can_be_made_of(kind: str, component: str, network: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    index = {"_class_name": kind, component: ["diffusers", network]}
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"model.path: .*{reason}"):
        check_files(load(config(tmp_path)))


@pytest.mark.slow
def test_the_page_lists_the_classes_that_are_tested() -> None:
    page = Path(__file__).parents[3] / "docs" / "pipelines.md"
    _, _, rest = page.read_text().partition("<!-- tested classes -->")
    listed = set(re.findall(r"`(\w+)`", rest.partition("<!-- end -->")[0]))
    made = [build() for build in FAMILIES.values()]
    assert listed == {type(one.pipe).__name__ for one in made if one.media != "audio"}
