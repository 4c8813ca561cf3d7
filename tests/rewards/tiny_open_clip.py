"""A small random CLIP made and saved by open_clip, in the two forms that its checkpoints have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from genrl_rewards.models.torchvision_compat import ensure

ensure()
open_clip = pytest.importorskip("open_clip", reason="the extra is not installed: pip install 'genrl-diffusion[clip]'")

NAME, SIDE = "genrl-tiny-clip", 16
CONFIG = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": SIDE, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2},
}


def register(folder: Path) -> str:
    """Tell open_clip of the architecture, as its users do; returns its name."""
    file = folder / f"{NAME}.json"
    file.write_text(json.dumps(CONFIG), encoding="utf-8")
    open_clip.add_model_config(file)
    return NAME


def model() -> Any:
    torch.manual_seed(0)
    clip = open_clip.create_model(NAME)
    for parameter in clip.parameters():
        if parameter.ndim == 1:  # open_clip starts them at 0 and 1, where a bias that is lost shows nothing
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return clip


def save(folder: Path) -> Path:
    """`HPS_v2.1_compressed.pt` as published: the weights in a dictionary, none of the architecture."""
    folder.mkdir(parents=True, exist_ok=True)
    register(folder)
    torch.save({"epoch": 1, "state_dict": model().state_dict()}, folder / "HPS_v2.1_compressed.pt")
    return folder


def save_folder(folder: Path, **preprocess: object) -> Path:
    """What `open_clip.push_to_hf_hub` writes: open_clip_config.json and the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    register(folder)
    both = {"model_cfg": CONFIG, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(both), encoding="utf-8")
    weights = {name: value.contiguous() for name, value in model().state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors")
    return folder
