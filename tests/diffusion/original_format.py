"""Tiny SD3 checkpoints in the format of their authors: one .safetensors file, names and layouts of that time."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

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
            found = re.match(rf"transformer_blocks\.(\d+)\.attn\.{before}([qkv])(?:_proj)?\.(\w+)$", name)
            if found:
                parts.setdefault(f"joint_blocks.{found[1]}.{after}.attn.qkv.{found[3]}", {})[found[2]] = value
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
        new = re.sub(r"decoder\.up\.(\d)", lambda found: f"decoder.up.{blocks - 1 - int(found[1])}", new)
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
