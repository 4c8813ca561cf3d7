"""Shapes of the networks of published pipelines, from their configurations: what `genrl check` needs before a download.

    python -m benchmarks.published_shapes

Each network is made without memory for its weights (device meta) by the classes of diffusers and transformers, with the
values of the config.json that its authors published; those of denoisers and autoencoders stand in
`benchmarks.full_size` (here at full depth), those of text encoders below. Writes genrl/diffusion/config/published.json;
genrl/vla/config/published.json, policies by the names and shapes of their files (`tests.vla`); and the sizes of
language models, beside the config.json of each in genrl/vlm/config/published.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from torch import nn

from benchmarks.full_size import MODELS, Published
from genrl.vlm.config.memory_estimate import PUBLISHED
from genrl.vlm.policies.loading import sizes
from tests.vla import openvla_folders
from tests.vla.groot_folders import REAL as GROOT_REAL
from tests.vla.groot_folders import groot_shapes
from tests.vla.published import PI_REAL, SMOL_REAL, pi_shapes, smol_shapes

FILE = Path(__file__).parents[1] / "genrl/diffusion/config/published.json"
POLICY_FILE = Path(__file__).parents[1] / "genrl/vla/config/published.json"
DEPTHS: dict[str, dict[str, Any]] = {
    "sd35_large": {"num_layers": 38},
    "wan22_a14b": {"num_layers": 40},
    "flux1_dev": {"num_layers": 19, "num_single_layers": 38},
    "flux1_kontext": {"num_layers": 19, "num_single_layers": 38},
    "flux1_schnell": {"num_layers": 19, "num_single_layers": 38},
    "flux2_klein_4b": {"num_layers": 5, "num_single_layers": 20},
    "z_image": {"n_layers": 30, "n_refiner_layers": 2},
    "qwen_image": {"num_layers": 60},
    "qwen_image_edit": {"num_layers": 60},
}
"""Blocks that `full_size` leaves out."""
SAME = {
    "CompVis/stable-diffusion-v1-4": "sd15",
    "stabilityai/sdxl-turbo": "sdxl",
}
"""Pipelines with the networks of another; sdxl-turbo is drawn at 512 pixels."""
CLIP = {"vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 49407, "bos_token_id": 49406}
CLIP_L = CLIP | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_L |= {"projection_dim": 768}
CLIP_G = CLIP | {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
CLIP_G |= {"projection_dim": 1280}
T5 = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "feed_forward_proj": "gated-gelu"}
QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN3_4B |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
QWEN25_VL_7B = {
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    },
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip_l": ("CLIPTextModel", "CLIPTextConfig", CLIP_L),
    "clip_l_projected": ("CLIPTextModelWithProjection", "CLIPTextConfig", CLIP_L),
    "clip_g": ("CLIPTextModelWithProjection", "CLIPTextConfig", CLIP_G),
    "t5_xxl": ("T5EncoderModel", "T5Config", T5 | {"vocab_size": 32128}),
    "umt5_xxl": ("UMT5EncoderModel", "UMT5Config", T5 | {"vocab_size": 256384}),
    "qwen3_4b": ("Qwen3ForCausalLM", "Qwen3Config", QWEN3_4B),
    "qwen3_4b_model": ("Qwen3Model", "Qwen3Config", QWEN3_4B),
    "qwen25_vl_7b": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", QWEN25_VL_7B),
}
"""Class, class of its configuration, and the published values."""
OF: dict[str, dict[str, str]] = {
    "sd15": {"text_encoder": "clip_l"},
    "sdxl": {"text_encoder": "clip_l", "text_encoder_2": "clip_g"},
    **dict.fromkeys(
        ("sd35_medium", "sd35_large"),
        {"text_encoder": "clip_l_projected", "text_encoder_2": "clip_g", "text_encoder_3": "t5_xxl"},
    ),
    **dict.fromkeys(("wan21_1_3b", "wan22_a14b"), {"text_encoder": "umt5_xxl"}),
    **dict.fromkeys(
        ("flux1_dev", "flux1_kontext", "flux1_schnell"), {"text_encoder": "clip_l", "text_encoder_2": "t5_xxl"}
    ),
    "flux2_klein_4b": {"text_encoder": "qwen3_4b"},
    "z_image": {"text_encoder": "qwen3_4b_model"},
    **dict.fromkeys(("qwen_image", "qwen_image_edit"), {"text_encoder": "qwen25_vl_7b"}),
}
"""The text encoders of each pipeline of `full_size` that a recipe trains."""


LIBERO = {"input_features": {f"observation.images.image{n}": {"type": "VISUAL"} for n in ("", 2)}}
"""Of policies that were fine-tuned for LIBERO: its two cameras."""
POLICIES: dict[str, dict[str, Any]] = {
    "lerobot/pi0_libero_finetuned": {"type": "pi0", "stored": 4, **LIBERO},
    "lerobot/pi05_libero_finetuned": {"type": "pi05", "stored": 4, **LIBERO},
    "HuggingFaceVLA/smolvla_libero": {"type": "smolvla", "stored": 2, "train_expert_only": True, **LIBERO},
    "nvidia/gr00t17-lerobot-libero_spatial-640": {"type": "groot", "stored": 4, "chunk_size": 16, **LIBERO},
    "Haozhan72/Openvla-oft-SFT-libero10-traj1": {"model_type": "openvla", "stored": 2},
}
"""What of their config.json the estimate reads, and the bytes of a number in their files."""


def saved(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that are saved, by name."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    shared = (getattr(model, "_tied_weights_keys", None) or ()) if tied else ()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in shared}


def packed(shapes: Mapping[str, tuple[int, ...]]) -> list[list[Any]]:
    """[name, shape] of each tensor; of those alike but for one number [name with `#`, shape, numbers]."""
    groups: defaultdict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    single: list[list[Any]] = []
    for name, shape in shapes.items():
        if match := re.search(r"(?<=\.)\d+(?=\.)", name):
            groups[f"{name[: match.start()]}#{name[match.end() :]}", shape].append(int(match.group()))
        else:
            single.append([name, list(shape)])
    return single + [[name, list(shape), runs(numbers)] for (name, shape), numbers in groups.items()]


def runs(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers as [first, last] of each run without gaps."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return spans


def row(model: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A network of the table."""
    plain = {key: value for key, value in settings.items() if not key.startswith("_") and value is not None}
    return {"class": type(model).__name__, "settings": plain, "shapes": packed(saved(model))}


def networks(key: str, model: Published) -> dict[str, Any]:
    """A pipeline's denoiser and autoencoder, and what looks at its pictures."""
    parts: dict[str, Any] = {}
    if key == "sd15":
        vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        seen = transformers.CLIPConfig(vision_config=vision | {"patch_size": 14}, projection_dim=768)
        with torch.device("meta"):
            parts["safety_checker"] = row(StableDiffusionSafetyChecker(seen), {})
    for part, (kind, settings) in (("denoiser", model.denoiser), ("vae", model.vae)):
        with torch.device("meta"):
            made = kind(**settings | (DEPTHS.get(key, {}) if part == "denoiser" else {}))
        parts[part] = row(made, dict(made.config))
    return parts


def write_policies() -> None:
    """The table of policies."""
    shapes = {
        "pi0": pi_shapes(PI_REAL, adaptive=False),
        "pi05": pi_shapes(PI_REAL, adaptive=True),
        "smolvla": smol_shapes(SMOL_REAL),
        "groot": groot_shapes(GROOT_REAL),
        "openvla": openvla_folders.shapes(openvla_folders.REAL),
    }
    write(POLICY_FILE, {"shapes": {kind: packed(of) for kind, of in shapes.items()}, "policies": POLICIES})


def write_language() -> None:
    """The sizes of every language model whose config.json is in the package."""
    for config in sorted(PUBLISHED.rglob("config.json")):
        text = json.dumps(asdict(sizes(str(config.parent), answers=False)), indent=1)
        config.with_name("sizes.json").write_text(f"{text}\n", encoding="utf-8")


def write(file: Path, table: Mapping[str, Mapping[str, Any]]) -> None:
    """A table, an entry a line."""
    parts = (
        f'"{part}": {{\n' + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in table[part].items()) + "\n}"
        for part in table
    )
    file.write_text("{" + ",\n".join(parts) + "}\n")


def main() -> None:
    """Write the tables; print the number of weights of each pipeline's networks."""
    write_policies()
    write_language()
    table: dict[str, dict[str, Any]] = {"networks": {}, "pipelines": {}}
    for name, (kind, config, settings) in ENCODERS.items():
        with torch.device("meta"):
            made = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        plain = {key: value for key, value in settings.items() if not isinstance(value, dict)}
        table["networks"][name] = row(made, plain)
    for key, encoders in OF.items():
        model, seen = MODELS[key], {}
        names = [name for name in ("unet", "transformer", "transformer_2") if model.tiny().pipe.components.get(name)]
        for part, network in networks(key, model).items():
            same = next((k for k, known in table["networks"].items() if known == network), f"{key}_{part}")
            table["networks"][same] = network
            seen |= {name: same for name in (names if part == "denoiser" else [part])}
        for source in (model.source, *(source for source, of in SAME.items() if of == key)):
            table["pipelines"][source] = encoders | seen
    write(FILE, table)
    from genrl.diffusion.config.estimate import published

    for source in table["pipelines"]:
        print(source, *(f"{part.name} {part.num_parameters:,}" for part in published(source)))


if __name__ == "__main__":
    main()
