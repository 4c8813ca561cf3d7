"""Tiny checkpoints in the layout of LeRobot's published ones, from the files of tests/fixtures/policies.

`layouts.yaml` is the check that ours is that layout: names as in lerobot/pi0_base (777 tensors) and pi05_base (812),
with the shapes of their architectures as functions of a few sizes; beside it are the JSON files of tiny ones.
"""

import json
import math
import re
import shutil
from collections.abc import Iterable
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace as Sizes
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from genrl.vla.policies.policy import ENVIRONMENT, STATE

FILES = Path(__file__).parents[1] / "fixtures" / "policies"
Shapes = dict[str, tuple[int, ...]]
AFFINE = ("weight", "bias")
BATCH = (*AFFINE, "running_mean", "running_var")


@cache
def layouts() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((FILES / "layouts.yaml").read_text())
    return parsed


def layout(kind: str, s: Sizes, norm: tuple[str, ...] = BATCH) -> Shapes:
    """Names and shapes of a kind of `layouts.yaml` with these sizes; norm: what those of a ResNet hold."""

    def shape(text: str) -> tuple[int, ...]:
        axes = ([int(n) if n.isdigit() else attrgetter(n)(s) for n in part.split("*")] for part in str(text).split())
        return tuple(map(math.prod, axes))

    shapes: Shapes = {}
    for block in layouts()[kind]:
        for n in range(0, getattr(s, block["times"]) if "times" in block else 1, block.get("step", 1)):
            for name, text in block["names"].items():
                stem, _, last = name.format(n=n, next=n + 1).rpartition(".")
                if last == "*":
                    shapes |= {f"{stem}.weight": shape(text), f"{stem}.bias": shape(text)[:1]}
                elif last == "@":  # how many batches a norm has seen is one number
                    shapes |= {f"{stem}.{part}": () if part.startswith("num") else shape(text) for part in norm}
                else:
                    shapes[f"{stem}.{last}" if stem else last] = shape(text)
    return shapes


WORDS = "Task State Action put the red green blue block in far zone touch : , ; <bos> <unk>".split()
LINES = ["put the red block in the far zone", "touch the blue block", "touch the green block"]

PI_TINY = Sizes(
    vocabulary=290, width=64, layers=4, mlp=128, queries=128, head=16,
    eye=32, eye_layers=2, eye_mlp=64, patch=14, patches=4, expert=64, expert_mlp=128, padded=32,
)  # fmt: skip
PI_REAL = Sizes(
    vocabulary=257152, width=2048, layers=18, mlp=16384, queries=2048, head=256,
    eye=1152, eye_layers=27, eye_mlp=4304, patch=14, patches=256, expert=1024, expert_mlp=4096, padded=32,
)  # fmt: skip


def pi_shapes(s: Sizes, *, adaptive: bool) -> Shapes:
    """Names and shapes of lerobot/pi0_base, or pi05_base."""
    return layout("pi05" if adaptive else "pi0", s)


SMOL_TINY = Sizes(
    vocabulary=290, width=64, layers=4, mlp=96, queries=64, head=32, size=16, eye=32, eye_layers=2, eye_mlp=64,
    patch=16, patches=4, shuffled=128, expert=48, expert_mlp=256, padded=32,
    heads=4, key_heads=2, eye_heads=4, picture=32, all_layers=8,
)  # fmt: skip
SMOL_REAL = Sizes(
    vocabulary=49280, width=960, layers=16, mlp=2560, queries=960, head=320, size=64, eye=768, eye_layers=12,
    eye_mlp=3072, patch=16, patches=1024, shuffled=12288, expert=720, expert_mlp=2048, padded=32,
    heads=15, key_heads=5, eye_heads=12, picture=512, all_layers=32,
)  # fmt: skip


def smol_shapes(s: Sizes) -> Shapes:
    """Names and shapes of lerobot/smolvla_base."""
    return layout("smolvla", s)


def random_weights(shapes: Shapes, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Numbers that keep activations near 1 and leave nothing without effect."""
    rng = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in shapes.items():
        fan = max(1, torch.Size(shape[1:]).numel())
        scale = 0.2 if len(shape) == 1 else fan**-0.5
        result[name] = (torch.randn(shape, generator=rng) * scale).to(dtype)
    return result


def write_tokenizer(folder: Path) -> None:
    """Words and the numbers -1 to 255, <pad> 0, <bos> in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", *WORDS, *(str(n) for n in range(-1, 256))]
    inner = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(pattern=r":", behavior="isolated"),
         pre_tokenizers.Split(pattern=",", behavior="isolated"), pre_tokenizers.Split(pattern=";", behavior="isolated")]
    )  # fmt: skip
    begin = [("<bos>", names.index("<bos>"))]
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=begin)
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>")
    outer.save_pretrained(folder / "tokenizer")


def write_folder(
    kind: str,
    folder: Path,
    weights: dict[str, Tensor],
    stats: dict[str, Tensor],
    metadata: dict[str, str] | None = None,
    steps: dict[str, dict[str, Any]] | None = None,
    **settings: Any,
) -> None:
    """The JSON files of a tiny one, with these weights and statistics, as LeRobot saves them.

    settings: changes of its config.json; steps: of the settings of a processor's steps.
    """
    shutil.copytree(FILES / kind, folder, dirs_exist_ok=True)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    save_file(weights, folder / "model.safetensors", metadata=metadata)
    features = config["input_features"] | config["output_features"]
    for name in ("policy_preprocessor", "policy_postprocessor"):
        pipeline = json.loads((folder / f"{name}.json").read_text())
        for step in pipeline["steps"]:
            step["config"] |= (steps or {}).get(step["registry_name"], {})
            if "normalizer" in step["registry_name"]:
                step["config"] |= {"features": features, "norm_map": config["normalization_mapping"]}
            if "state_file" in step:
                save_file(stats, folder / step["state_file"])
        (folder / f"{name}.json").write_text(json.dumps(pipeline, indent=2))


def statistics_of(widths: dict[str, int], seed: int = 1) -> dict[str, Tensor]:
    """Some of every kind, by feature."""
    rng = torch.Generator().manual_seed(seed)
    result = {}
    for name, width in widths.items():
        low = -1.0 - torch.rand(width, generator=rng)
        high = 1.0 + torch.rand(width, generator=rng)
        result |= {f"{name}.min": low - 0.5, f"{name}.q01": low, f"{name}.q10": low + 0.3}
        result |= {f"{name}.max": high + 0.5, f"{name}.q99": high, f"{name}.q90": high - 0.3}
        result |= {f"{name}.mean": (low + high) / 2, f"{name}.std": (high - low) / 3}
        result[f"{name}.count"] = torch.tensor([100.0])
    return result


def pi_folder(
    folder: Path,
    *,
    adaptive: bool = False,
    prefix: str = "",
    dtype: torch.dtype = torch.float32,
    weights: dict[str, Tensor] | None = None,
    **settings,
) -> dict[str, Tensor]:
    """A tiny pi0 or pi0.5 with two cameras and an empty one; the weights by bare published name."""
    weights = weights or random_weights(pi_shapes(PI_TINY, adaptive=adaptive), dtype=dtype)
    tied = "paligemma_with_expert.paligemma."
    metadata = {"format": "pt", f"{tied}model.language_model.embed_tokens.weight": f"{tied}lm_head.weight"}
    named, stats = {prefix + key: value for key, value in weights.items()}, statistics_of(NUMBERS)
    steps = {"tokenizer_processor": {"max_length": settings.get("tokenizer_max_length", 60 if adaptive else 12)}}
    write_folder("pi05" if adaptive else "pi0", folder, named, stats, metadata, steps, **settings)
    write_tokenizer(folder)
    return weights


NUMBERS = {"observation.state": 5, "action": 3}


def observed(cameras: Iterable[str], size: tuple[int, int], *batch: int, environment: int = 0) -> dict[str, Tensor]:
    """Pictures of these cameras, five numbers of state, and so many of an environment."""
    rng, names = torch.Generator().manual_seed(2), [f"observation.images.{name}" for name in cameras]
    pictures = torch.randint(0, 256, (len(names), *batch, *size, 3), generator=rng, dtype=torch.uint8)
    seen = dict(zip(names, pictures, strict=True)) | {STATE: torch.randn(*batch, 5, generator=rng)}
    return seen | ({ENVIRONMENT: torch.randn(*batch, environment, generator=rng)} if environment else {})


def pi_observation(batch: int = 3) -> dict[str, Tensor]:
    """Without the instruction's tokens."""
    return observed(("base_0_rgb", "left_wrist_0_rgb"), (24, 32), batch)


def smol_folder(
    folder: Path,
    *,
    s: Sizes = SMOL_TINY,
    dtype: torch.dtype = torch.float32,
    weights: dict[str, Tensor] | None = None,
    **settings,
) -> dict[str, Tensor]:
    """A SmolVLA with two cameras, its backbone's description in vlm/; the weights by published name."""
    text = {"model_type": "llama", "hidden_size": s.width, "intermediate_size": s.mlp, "rope_theta": 100000.0,
            "num_hidden_layers": s.all_layers, "num_attention_heads": s.heads, "num_key_value_heads": s.key_heads,
            "head_dim": s.size, "rms_norm_eps": 1e-5, "vocab_size": s.vocabulary}  # fmt: skip
    vision = {"model_type": "smolvlm_vision", "hidden_size": s.eye, "intermediate_size": s.eye_mlp,
              "num_hidden_layers": s.eye_layers, "num_attention_heads": s.eye_heads, "patch_size": s.patch,
              "image_size": s.picture}  # fmt: skip
    scale = round((s.shuffled / s.eye) ** 0.5)
    vlm = {"model_type": "smolvlm", "text_config": text, "vision_config": vision, "scale_factor": scale}
    (folder / "vlm").mkdir(parents=True, exist_ok=True)
    (folder / "vlm" / "config.json").write_text(json.dumps(vlm))
    weights = weights or random_weights(smol_shapes(s), dtype=dtype)
    settings = {"resize_imgs_with_padding": [s.picture] * 2, "num_vlm_layers": s.layers} | settings
    write_folder("smolvla", folder, weights, statistics_of(NUMBERS), {"format": "pt"}, **settings)
    write_tokenizer(folder)
    return weights


DIFFUSION_TINY = Sizes(first=16, second=24, third=32, kernel=3, time=12, points=4, cell=4, state=5, action=3)
DIFFUSION_REAL = Sizes(first=512, second=1024, third=2048, kernel=5, time=128, points=32, cell=9, state=2, action=2)


def diffusion_shapes(s: Sizes, *, cameras: int = 1, separate: bool = False, groups: bool = True) -> Shapes:
    """Names and shapes of lerobot/diffusion_pusht."""
    condition = s.time + 2 * (s.state + cameras * 2 * s.points)
    whole = Sizes(**vars(s), condition=condition, encoders=cameras if separate else 1)
    shapes = layout("diffusion", whole, AFFINE if groups else (*BATCH, "num_batches_tracked"))
    return shapes if separate else {name.replace("rgb_encoder.0.", "rgb_encoder."): n for name, n in shapes.items()}


def diffusion_folder(
    folder: Path, *, cameras: int = 1, groups: bool = True, state: int = 5, **settings
) -> dict[str, Tensor]:
    """A tiny Diffusion Policy (its ResNet-18 is a real one); the weights by published name."""
    s = Sizes(**vars(DIFFUSION_TINY) | {"state": state})
    names = [f"observation.images.camera{n}" for n in range(cameras)]
    inputs: dict[str, Any] = {name: {"type": "VISUAL", "shape": [3, 36, 40]} for name in names}
    settings = {"input_features": inputs | {STATE: {"type": "STATE", "shape": [state]}}} | settings
    separate = settings.get("use_separate_rgb_encoder_per_camera", False)
    weights = random_weights(diffusion_shapes(s, cameras=cameras, separate=separate, groups=groups))
    for key in weights:
        if key.endswith("running_var"):
            weights[key] = weights[key].abs() + 0.5
        if key.endswith("pos_grid"):
            weights[key] = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
        if key.endswith("num_batches_tracked"):
            weights[key] = torch.tensor(7)
        if key.endswith((".bn1.weight", ".bn2.weight", "block.1.weight")):
            weights[key] = weights[key] + 1.0
    stats = statistics_of({STATE: s.state, "action": s.action}) | of_pictures(names)
    write_folder("diffusion", folder, weights, stats, use_group_norm=groups, **settings)
    return weights


def of_pictures(names: list[str]) -> dict[str, Tensor]:
    mean, std = torch.tensor([[0.4, 0.5, 0.6], [0.2, 0.25, 0.3]])[..., None, None]
    return {f"{name}.{key}": value.clone() for name in names for key, value in (("mean", mean), ("std", std))}


ACT_TINY = Sizes(
    size=32, heads=4, wide=48, encoder=2, decoder=2, vae=2, latent=6, chunk=8, state=5, environment=4, action=3
)
ACT_REAL = Sizes(
    size=512, heads=8, wide=3200, encoder=4, decoder=1, vae=4, latent=32, chunk=100, state=14, environment=0, action=14
)


def act_shapes(s: Sizes, *, use_vae: bool = True, pre_norm: bool = False) -> Shapes:
    """Names and shapes of lerobot/act_aloha_sim_transfer_cube_human."""
    without = [] if use_vae else ["model.vae_encoder"]
    without += [] if pre_norm else ["model.encoder.norm.", "model.vae_encoder.norm."]
    without += [] if s.environment else ["model.encoder_env_state"]
    shapes = layout("act", Sizes(**vars(s), places=2 + s.chunk, features=2 + bool(s.environment)))
    return {name: shape for name, shape in shapes.items() if not name.startswith(tuple(without))}


def act_folder(folder: Path, **settings) -> dict[str, Tensor]:
    """A tiny ACT (its ResNet-18 is a real one) that reads state, environment and pictures; the weights by published
    name."""
    s = ACT_TINY
    weights = random_weights(act_shapes(s, **{k: settings[k] for k in ("use_vae", "pre_norm") if k in settings}))
    for key in weights:
        if key.endswith("running_var"):
            weights[key] = weights[key].abs() + 0.5
        if key.endswith((".bn1.weight", ".bn2.weight", "downsample.1.weight")) or re.search(r"norm\d?\.weight$", key):
            weights[key] = weights[key] + 1.0
        if key.endswith("pos_embed.weight"):
            weights[key] = weights[key] * s.size**0.5  # places and queries are as far apart as in a new ACT
        if key.endswith("vae_encoder_pos_enc"):
            place = torch.arange(2 + s.chunk, dtype=torch.float64)[:, None]
            angle = place * 10_000.0 ** -(torch.arange(s.size, dtype=torch.float64) // 2 * 2 / s.size)
            weights[key] = torch.where(torch.arange(s.size) % 2 == 0, angle.sin(), angle.cos()).float()[None]
    stats = statistics_of({STATE: s.state, ENVIRONMENT: s.environment, "action": s.action})
    stats |= of_pictures([f"observation.images.camera{n}" for n in range(2)])
    write_folder("act", folder, weights, stats, {"format": "pt"}, **settings)
    return weights


def act_observation(batch: int = 3) -> dict[str, Tensor]:
    return observed(("camera0", "camera1"), (36, 40), batch, environment=4)


def diffusion_observation(batch: int = 3, history: int | None = 2, cameras: int = 1) -> dict[str, Tensor]:
    """As `diffusion_folder` reads it; history: observations, None for one without that axis."""
    shape = (batch,) if history is None else (batch, history)
    return observed((f"camera{n}" for n in range(cameras)), (36, 40), *shape)
