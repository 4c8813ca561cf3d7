"""Published architectures at full size, with random weights: one iteration, a resume, the LoRA in plain diffusers.

    python -m benchmarks.full_size [--models sd15 wan21_1_3b] [--pixels 64] [--folder DIR]

No weights are downloaded: each denoiser and autoencoder is made from its published configuration, its text encoders are
tiny ones of the right width, and the pipeline is saved in bfloat16 as diffusers saves it. FLUX, Z-Image, SD3.5 large,
Wan 2.2 and Qwen-Image have their full width but few blocks; the others are whole. Then, for each recipe of the model
(where there is none, Flow-GRPO's and DiffusionNFT's for the embedded model), made small in pixels, steps, samples and
rewards alone, and with the weights held in float32 (bfloat16 arithmetic is slow on most CPUs), each in a process of its
own:

- `genrl train` for one iteration: the ratio of the first update, model calls, seconds, and the peak of the process's
  own memory without what its libraries held before the model was loaded, beside the estimate of `genrl check`; the C
  library is told to give back what is freed;
- of the first recipe, `genrl resume` for a second iteration;
- and `genrl sample` with its LoRA, which is plain diffusers.

A LoRA that is saved has been loaded again and compared by the run itself. Writes full_size.json after every model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import parser, save
from genrl.config import ConfigError, check_files, dump, load, load_located
from genrl.data import prompts as prompt_files
from genrl.diffusion.config.estimate import read_components
from genrl.diffusion.config.memory_estimate import memory
from genrl.diffusion.config.schema import Config
from genrl.runtime.loop.frame import train
from tests.diffusion import image_families, starting_families, video_families
from tests.diffusion import tiny_parts as parts
from tests.diffusion.tiny_parts import Family

KL = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 1024,
}
"""The autoencoder of Stable Diffusion and of most that came after."""
KL16 = KL | {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
DC = {
    "latent_channels": 32,
    "attention_head_dim": 32,
    "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "encoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "decoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
    "decoder_layers_per_block": (3, 3, 3, 3, 3, 3),
    "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "downsample_block_type": "Conv",
    "upsample_block_type": "interpolate",
    "decoder_norm_types": "rms_norm",
    "decoder_act_fns": "silu",
    "scaling_factor": 0.41407,
}
"""The deep-compression autoencoder of Sana, 32 x 32 pixels to a latent."""


NO_FROZEN = ("model.lora.frozen=[]",)
"""A distilled LoRA is on the hub alone."""
FEW_WORDS = ("sampling.pipeline_args={max_sequence_length: 32}",)
"""Text tokens run through the blocks beside the few of a small picture."""
NO_BINS = "sampling.pipeline_args={use_resolution_binning: false}"
"""Else a small picture is drawn at 1024 px and made smaller."""


class Published(NamedTuple):
    """A pipeline at its published size."""

    tiny: Callable[[], Family]
    """The same pipeline with tiny networks."""
    denoiser: tuple[type, dict[str, Any]]
    vae: tuple[type, dict[str, Any]]
    encoders: dict[str, Callable[[], nn.Module]]
    """Tiny text encoders of the width that the denoiser reads."""
    source: str
    """Hub id whose configurations these are."""
    recipes: tuple[str, ...] = ("flow_grpo", "diffusion_nft")
    """Names of files in configs/diffusion; or these two, on the embedded model's."""
    frames: int | None = None
    changes: tuple[str, ...] = ()


MODELS: dict[str, Published] = {
    "sd15": Published(
        image_families.sd15,
        (UNet2DConditionModel, {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}),
        (AutoencoderKL, KL | {"latent_channels": 4, "scaling_factor": 0.18215, "sample_size": 512}),
        {"text_encoder": lambda: parts.clip_encoder(768)},
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        ("flow_grpo", "sd15_ddpo", "sd15_d3po", "sd14_prdp", "sd14_b2_diffurl", "sd14_draft", "diffusion_nft"),
    ),
    "sdxl": Published(
        image_families.sdxl,
        (
            UNet2DConditionModel,
            {
                "sample_size": 128,
                "block_out_channels": (320, 640, 1280),
                "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                "attention_head_dim": (5, 10, 20),
                "transformer_layers_per_block": (1, 2, 10),
                "cross_attention_dim": 2048,
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
            },
        ),
        (AutoencoderKL, KL | {"latent_channels": 4, "scaling_factor": 0.13025}),
        {
            "text_encoder": lambda: parts.clip_encoder(768),
            "text_encoder_2": lambda: parts.clip_projection_encoder(1280),
        },
        "stabilityai/stable-diffusion-xl-base-1.0",
        ("sdxl_flow_grpo", "sdxl_turbo_flow_grpo", "sdxl_lightning_flow_grpo", "sdxl_spo"),
        changes=NO_FROZEN,
    ),
    "pixart_sigma": Published(
        image_families.pixart_sigma,
        (
            PixArtTransformer2DModel,
            {
                "sample_size": 128,
                "num_layers": 28,
                "caption_channels": 4096,
                "interpolation_scale": 2,
                "use_additional_conditions": False,
            },
        ),
        (AutoencoderKL, KL | {"latent_channels": 4, "scaling_factor": 0.13025}),
        {"text_encoder": lambda: parts.t5_encoder(4096)},
        "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        changes=("model.lora=null", NO_BINS),  # diffusers has no adapters for it
    ),
    "sana_1_6b": Published(
        image_families.sana,
        (SanaTransformer2DModel, {"sample_size": 32}),  # its other values are the class's own
        (AutoencoderDC, DC),
        {"text_encoder": lambda: parts.gemma2_encoder(2304)},
        "Efficient-Large-Model/Sana_1600M_1024px_diffusers",
        changes=(NO_BINS,),
    ),
    "sd35_medium": Published(
        image_families.sd3,
        (
            SD3Transformer2DModel,
            {
                "sample_size": 128,
                "num_layers": 24,
                "num_attention_heads": 24,
                "attention_head_dim": 64,
                "caption_projection_dim": 1536,
                "joint_attention_dim": 4096,
                "pooled_projection_dim": 2048,
                "pos_embed_max_size": 384,
                "dual_attention_layers": tuple(range(13)),
                "qk_norm": "rms_norm",
            },
        ),
        (AutoencoderKL, KL16 | {"scaling_factor": 1.5305, "shift_factor": 0.0609}),
        {
            "text_encoder": lambda: parts.clip_projection_encoder(768),
            "text_encoder_2": lambda: parts.clip_projection_encoder(1280),
            "text_encoder_3": lambda: parts.t5_encoder(4096),
        },
        "stabilityai/stable-diffusion-3.5-medium",
        (
            "sd35_medium_flow_grpo",
            "sd35_medium_flow_grpo_fast",
            "sd35_medium_diffusion_nft",
            "sd35_medium_adv_grpo",
            "sd35_medium_tree_grpo",
            "sd35_medium_several_rewards",
        ),
        changes=FEW_WORDS,
    ),
    "sd35_large": Published(
        image_families.sd3,
        (
            SD3Transformer2DModel,
            {
                "sample_size": 128,
                "num_layers": 2,
                "num_attention_heads": 38,
                "attention_head_dim": 64,
                "caption_projection_dim": 2432,
                "joint_attention_dim": 4096,
                "pooled_projection_dim": 2048,
                "pos_embed_max_size": 192,
                "qk_norm": "rms_norm",
            },
        ),
        (AutoencoderKL, KL16 | {"scaling_factor": 1.5305, "shift_factor": 0.0609}),
        {
            "text_encoder": lambda: parts.clip_projection_encoder(768),
            "text_encoder_2": lambda: parts.clip_projection_encoder(1280),
            "text_encoder_3": lambda: parts.t5_encoder(4096),
        },
        "stabilityai/stable-diffusion-3.5-large-turbo",
        ("sd35_large_turbo_diffusion_nft",),
        changes=FEW_WORDS,
    ),
    "wan21_1_3b": Published(
        video_families.wan_t2v,
        (
            WanTransformer3DModel,
            {
                "num_attention_heads": 12,
                "num_layers": 30,
                "ffn_dim": 8960,
                "cross_attn_norm": True,
                "qk_norm": "rms_norm_across_heads",
            },
        ),
        (AutoencoderKLWan, {}),
        {"text_encoder": lambda: parts.umt5_encoder(4096)},
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        ("wan21_t2v_1_3b_flow_grpo", "diffusion_nft"),
        frames=5,
    ),
    "wan22_a14b": Published(
        video_families.wan22,
        (
            WanTransformer3DModel,
            {
                "num_attention_heads": 40,
                "num_layers": 1,
                "ffn_dim": 13824,
                "cross_attn_norm": True,
                "qk_norm": "rms_norm_across_heads",
            },
        ),
        (AutoencoderKLWan, {}),
        {"text_encoder": lambda: parts.umt5_encoder(4096)},
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        ("wan22_t2v_a14b_flow_grpo",),
        frames=5,
    ),
    "lumina2": Published(
        image_families.lumina2,
        (
            Lumina2Transformer2DModel,
            {"cap_feat_dim": 2304, "scaling_factor": 1.0, "axes_lens": (300, 512, 512)},
        ),
        (AutoencoderKL, KL16 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
        {"text_encoder": lambda: parts.gemma2_encoder(2304)},
        "Alpha-VLLM/Lumina-Image-2.0",
    ),
    "flux1_dev": Published(
        image_families.flux,
        (FluxTransformer2DModel, {"guidance_embeds": True, "num_layers": 1, "num_single_layers": 1}),
        (AutoencoderKL, KL16 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
        {"text_encoder": lambda: parts.clip_encoder(768), "text_encoder_2": lambda: parts.t5_encoder(4096)},
        "black-forest-labs/FLUX.1-dev",
        ("flux1_dev_flow_grpo", "flux1_dev_mix_grpo", "flux1_dev_paco_grpo", "flux1_dev_24gb", "flux1_dev_branch_grpo"),
        changes=("model.encodings=null",),
    ),
    "flux1_kontext": Published(
        starting_families.flux_kontext,
        (FluxTransformer2DModel, {"guidance_embeds": True, "num_layers": 1, "num_single_layers": 1}),
        (AutoencoderKL, KL16 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
        {"text_encoder": lambda: parts.clip_encoder(768), "text_encoder_2": lambda: parts.t5_encoder(4096)},
        "black-forest-labs/FLUX.1-Kontext-dev",
        ("flux1_kontext_flow_grpo",),
    ),
    "flux1_schnell": Published(
        image_families.flux,
        (FluxTransformer2DModel, {"num_layers": 1, "num_single_layers": 1}),
        (AutoencoderKL, KL16 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
        {"text_encoder": lambda: parts.clip_encoder(768), "text_encoder_2": lambda: parts.t5_encoder(4096)},
        "black-forest-labs/FLUX.1-schnell",
        ("flux1_schnell_diffusion_nft",),
    ),
    "flux2_klein_4b": Published(
        image_families.flux2_klein,
        (
            Flux2Transformer2DModel,
            {
                "num_layers": 1,
                "num_single_layers": 1,
                "num_attention_heads": 24,
                "joint_attention_dim": 7680,
                "guidance_embeds": False,
            },
        ),
        (AutoencoderKLFlux2, {}),
        {"text_encoder": lambda: Qwen3ForCausalLM(Qwen3Config(**parts.decoder_sizes(2560, layers=28)))},
        "black-forest-labs/FLUX.2-klein-4B",
        ("flux2_klein_4b_diffusion_nft",),
    ),
    "z_image": Published(
        image_families.z_image,
        (ZImageTransformer2DModel, {"n_layers": 2, "n_refiner_layers": 1}),
        (AutoencoderKL, KL16 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
        {"text_encoder": lambda: parts.qwen3_encoder(2560)},
        "Tongyi-MAI/Z-Image-Turbo",
        ("z_image_turbo_diffusion_nft",),
    ),
    "qwen_image": Published(
        image_families.qwen_image,
        (QwenImageTransformer2DModel, {"num_layers": 2}),
        (AutoencoderKLQwenImage, {}),
        {"text_encoder": lambda: parts.qwen_vl_encoder(3584)},
        "Qwen/Qwen-Image",
        ("qwen_image_flow_grpo", "qwen_image_lightning_diffusion_nft"),
        changes=NO_FROZEN,
    ),
    "qwen_image_edit": Published(
        starting_families.qwen_image_edit,
        (QwenImageTransformer2DModel, {"num_layers": 2}),
        (AutoencoderKLQwenImage, {}),
        {"text_encoder": lambda: parts.qwen_vl_encoder(3584)},
        "Qwen/Qwen-Image-Edit",
        ("qwen_image_edit_talk2move",),
    ),
}
SHAPES = "prompts={train: assets/prompts/shapes_train.txt, eval: assets/prompts/shapes_eval.txt}"
EDITS = "prompts={train: assets/edits/move_train.jsonl, eval: assets/edits/move_eval.jsonl}"
FURTHER: dict[str, tuple[str, ...]] = {
    "sd35_medium_adv_grpo": (
        SHAPES,
        "rewards=[{name: dino_adversary, args: {model: assets/tiny-dino, size: 64}}]",
        "trainer.adversary={references: 'assets/references:train', every: 2}",
        "iterations=2",  # the head, then the model
    ),
    "sd35_medium_tree_grpo": ("sampling.group_size=9", "sampling.batch_size=9"),
    "sd14_b2_diffurl": (
        "sampling.group_size=5",
        "sampling.batch_size=5",
        "trainer.window={size: 4, high: 4, schedule: backward, shortest: 3}",
    ),
    "flux1_dev_branch_grpo": ("sampling.group_size=4", "trainer.tree.at=[0, 1]", "trainer.tree.prune={depths: [3]}"),
    "sd14_draft": ("rewards=[{name: sharpness}]",),
    "sdxl_spo": ("trainer.first=1", "trainer.threshold=1e-6"),
    "sdxl_dpo_offline": (
        "prompts={train: 'assets/preferences:train', eval: assets/prompts/shapes_eval.txt}",
        "optimizer.warmup_steps=0",
    ),
    "flux1_kontext_flow_grpo": (
        EDITS,
        "sampling.pipeline_args.max_area=4096",
        "sampling.pipeline_args.max_sequence_length=32",
    ),
    "qwen_image_edit_talk2move": (EDITS, "trainer.exit_step=2"),
}
"""What a recipe needs beside `SMALL`: data of its kind that is here, trees of few leaves."""
EMBEDDED = {"flow_grpo": "configs/flow_grpo.yaml", "diffusion_nft": "configs/diffusion/diffusion_nft.yaml"}
PROMPTS = ("a red cube", "two blue dogs", "a cat under a table", "a green star", "the word genrl")
"""Few: encodings that are made ahead are kept in the memory of the host, which is that of the device here."""
SMALL = (
    "rewards=[{name: jpeg}]",
    "sampling.group_size=2",
    "sampling.batch_size=2",
    "model.dtype=float32",
    "model.autocast=null",
    "model.variant=null",
    "distributed.fsdp=false",
    "evaluation.every=0",
    "evaluation.monitor=null",
    "checkpoint.every=1",
    "trackers=[]",
    "iterations=1",
)
STEPS = 4
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""glibc returns freed memory to the system; else it keeps hundreds of MB, which would be taken for the run's."""


def build(model: Published, folder: Path, device: str = "cpu") -> int:
    """Save the pipeline in bfloat16; returns the number of the denoiser's weights. device: where they are drawn."""
    pipe: Any = model.tiny().pipe
    names = [name for name in ("unet", "transformer", "transformer_2") if pipe.components.get(name) is not None]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        for part, (kind, settings) in (*((name, model.denoiser) for name in names), ("vae", model.vae)):
            with torch.device(device):
                pipe.register_modules(**{part: kind(**settings)})
    finally:
        torch.set_default_dtype(torch.float32)
    pipe.register_modules(**{part: make() for part, make in model.encoders.items()})
    pipe.to(torch.bfloat16).save_pretrained(folder)
    return sum(p.numel() for name in names for p in pipe.components[name].parameters())


def configured(
    model: Published,
    recipe: str,
    pipeline: Path,
    output: Path,
    pixels: int,
    further: Sequence[str] = (),
    steps: int | None = STEPS,
) -> Config:
    """The recipe made small, on this pipeline, with `further` changes. steps: None = as many as it says. Raises
    ConfigError where its method does not fit the model."""
    file = EMBEDDED.get(recipe, f"configs/diffusion/{recipe}.yaml")
    config = load(file)
    assert isinstance(config, Config)
    train, held_out = output.with_suffix(".train.txt"), output.with_suffix(".eval.txt")
    train.write_text("\n".join(PROMPTS[:-1]))
    held_out.write_text(PROMPTS[-1])
    changes = [*SMALL, f"prompts={{train: {train}, eval: {held_out}}}", f"model.path={pipeline}", f"output={output}"]
    changes += [f"sampling.height={pixels}", f"sampling.width={pixels}"]
    changes += [f"sampling.prompts_per_iteration={config.trainer.updates}"]  # a micro-batch for each update
    changes += [] if config.ema is None else ["ema.every=1"]  # the run is shorter than eight steps
    changes += [] if model.frames is None else [f"sampling.num_frames={model.frames}"]
    changes += [] if steps is None else _of_steps(config, steps)
    if recipe in EMBEDDED:
        changes += ["sampling.pipeline_args={}", "model.lora.targets=null"]  # theirs are of the embedded model
    changes += [*model.changes, *FURTHER.get(recipe, ())]
    if recipe == "flow_grpo":
        changes += ["sampling.guidance_scale=4.5", *_kernel(pipeline)]
    changes += further
    config, origins = load_located(file, changes)
    assert isinstance(config, Config)
    check_files(config, origins)
    return config


def _of_steps(config: Config, steps: int) -> list[str]:
    """evaluation's are those that `genrl sample` takes."""
    changes = [f"sampling.num_inference_steps={steps}", f"evaluation.num_inference_steps={steps}"]
    if (getattr(config.trainer, "timesteps_per_sample", None) or 0) > steps:
        changes += [f"trainer.timesteps_per_sample={steps}"]
    if getattr(config.trainer, "window", None) is not None:
        changes += ["trainer.window={size: 2, low: 0, high: 3}"]
    return changes


def _kernel(pipeline: Path) -> list[str]:
    scheduler = json.loads((pipeline / "scheduler" / "scheduler_config.json").read_text())
    flow = "FlowMatch" in scheduler["_class_name"] or scheduler.get("prediction_type") == "flow_prediction"
    return [] if flow else ["trainer.kernel=ddim", "trainer.noise_level=1.0"]


class Peak:
    """Largest private memory of this process while it is open, looked at 20 times a second."""

    def __enter__(self) -> Peak:
        self.before = self.peak = private_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.peak = max(self.peak, private_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def private_bytes() -> int:
    """Memory of this process that no file backs: a mapped weight file is not in it."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match.group(1)) * 1024


def child(file: str) -> None:
    """Train this configuration and print seconds and peak memory as JSON; for a process of its own."""
    torch.set_num_threads(1)
    config, started = load(file), time.perf_counter()
    with Peak() as peak:
        train(config)
    print(json.dumps({"seconds": time.perf_counter() - started, "peak_bytes": peak.peak - peak.before}))


def last_line(*command: str) -> str:
    """Of what it prints. Raises RuntimeError with all of it where it fails, or says that the first ratio is not 1."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=os.environ | GIVES_BACK)
    if done.returncode or "is off 1 by" in done.stdout + done.stderr:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout.strip().rpartition("\n")[2]


def rehearse(
    model: Published, recipe: str, pipeline: Path, output: Path, pixels: int, *, goes_on: bool
) -> dict[str, Any]:
    """The row of one model and recipe. goes_on: resume it, and draw with it."""
    try:
        config = configured(model, recipe, pipeline, output, pixels)
    except ConfigError as error:
        return {"refused": str(error)}
    file = output.with_suffix(".yaml")
    file.write_text(dump(config))
    row: dict[str, Any] = json.loads(last_line("-c", f"from benchmarks.full_size import child; child({str(file)!r})"))
    row["estimate_bytes"] = sum(size for _, size in memory(config, read_components(pipeline)))
    first = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    wanted = ("ratio/", "model_calls/", "updates", "grad_norm")
    row["metrics"] = {key: value for key, value in first.items() if key.startswith(wanted)}
    if not goes_on:
        return row
    started = time.perf_counter()
    last_line("-m", "genrl", "resume", str(output), "iterations=2")
    rows = (output / "metrics.jsonl").read_text().splitlines()
    row["resumed"] = {"seconds": time.perf_counter() - started, "updates": json.loads(rows[-1])["updates"]}
    if config.model.lora is not None:
        last_line("-m", "genrl", "sample", str(output), *to_draw(config, output), "--out", str(output / "drawn"))
    return row


def to_draw(config: Config, output: Path) -> list[str]:
    """What `genrl sample` is to draw: a prompt, or where the pipeline is given pictures a held-out row with its own."""
    if not config.sampling.inputs:
        return ["--prompt", "a red cube"]
    row, folder = prompt_files.load(str(config.prompts.eval))[0], output.with_suffix(".row")
    folder.mkdir()
    pictures = {column: Path(row.columns[column]) for column in config.sampling.inputs.values()}
    for picture in pictures.values():
        shutil.copy(picture, folder)
    line = {"prompt": row.text} | {column: picture.name for column, picture in pictures.items()}
    (folder / "row.jsonl").write_text(json.dumps(line))
    return ["--prompts", str(folder / "row.jsonl")]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--recipes", nargs="+", help="of these models; default: each one's own")
    arguments.add_argument("--pixels", type=int, default=64, help="side of the pictures; a multiple of 64")
    arguments.add_argument("--folder", type=Path, help="where models and runs go; default: a temporary folder")
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    rows: dict[str, Any] = {}
    for name in given.models:
        model, pipeline = MODELS[name], folder / name
        row = rows[name] = {"source": model.source, "denoiser_weights": build(model, pipeline), "pixels": given.pixels}
        for recipe in given.recipes or model.recipes:
            first = recipe == model.recipes[0]
            output = folder / f"{name}-{recipe}"
            row[recipe] = rehearse(model, recipe, pipeline, output, given.pixels, goes_on=first)
            print(name, recipe, json.dumps(row[recipe]), flush=True)
        save(given.out, "full_size", rows)
        shutil.rmtree(pipeline)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
