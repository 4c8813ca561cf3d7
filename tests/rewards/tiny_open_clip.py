"""A random CLIP under open_clip's names, and what it computes, from those names alone."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from tests.rewards.tiny_clip import byte_symbols

WIDTH, EMBED, LAYERS, PATCH, SIDE, HEADS, LENGTH = 32, 24, 2, 8, 16, 16, 77
TOKENS = 2 * 256 + 2


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    held = {
        "positional_embedding": 0.1 * torch.randn(LENGTH, WIDTH),
        "text_projection": torch.randn(WIDTH, EMBED),
        "logit_scale": torch.tensor(4.6),
        "token_embedding.weight": torch.randn(TOKENS, WIDTH),
        "visual.class_embedding": torch.randn(WIDTH),
        "visual.positional_embedding": torch.randn((SIDE // PATCH) ** 2 + 1, WIDTH),
        "visual.proj": torch.randn(WIDTH, EMBED),
        "visual.conv1.weight": torch.randn(WIDTH, 3, PATCH, PATCH) / PATCH,
    }
    for name in ("ln_final", "visual.ln_pre", "visual.ln_post"):
        held |= {f"{name}.weight": 1 + 0.1 * torch.randn(WIDTH), f"{name}.bias": 0.1 * torch.randn(WIDTH)}
    for tower in ("", "visual."):
        for i in range(LAYERS):
            block = f"{tower}transformer.resblocks.{i}"
            for name in ("ln_1", "ln_2"):
                held[f"{block}.{name}.weight"] = 1 + 0.1 * torch.randn(WIDTH)
                held[f"{block}.{name}.bias"] = 0.1 * torch.randn(WIDTH)
            shapes = {"attn.in_proj_": 3, "attn.out_proj.": 1, "mlp.c_fc.": 4}
            for name, times in shapes.items():
                held[f"{block}.{name}weight"] = torch.randn(times * WIDTH, WIDTH) / WIDTH**0.5
                held[f"{block}.{name}bias"] = 0.1 * torch.randn(times * WIDTH)
            held[f"{block}.mlp.c_proj.weight"] = torch.randn(WIDTH, 4 * WIDTH) / WIDTH**0.5
            held[f"{block}.mlp.c_proj.bias"] = 0.1 * torch.randn(WIDTH)
    return held


def _run(held: dict[str, torch.Tensor], x: torch.Tensor, tower: str, causal: bool) -> torch.Tensor:
    def norm(y: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(y, (WIDTH,), held[f"{name}.weight"], held[f"{name}.bias"])

    for i in range(LAYERS):
        block = f"{tower}transformer.resblocks.{i}"
        qkv = F.linear(
            norm(x, f"{block}.ln_1"), held[f"{block}.attn.in_proj_weight"], held[f"{block}.attn.in_proj_bias"]
        )
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, held[f"{block}.attn.out_proj.weight"], held[f"{block}.attn.out_proj.bias"])
        inner = F.linear(norm(x, f"{block}.ln_2"), held[f"{block}.mlp.c_fc.weight"], held[f"{block}.mlp.c_fc.bias"])
        x = x + F.linear(F.gelu(inner), held[f"{block}.mlp.c_proj.weight"], held[f"{block}.mlp.c_proj.bias"])
    name = f"{tower}ln_post" if tower else "ln_final"
    return norm(x, name)


def embed_images(held: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    x = F.conv2d(pixels, held["visual.conv1.weight"], stride=PATCH).flatten(2).transpose(1, 2)
    x = torch.cat([held["visual.class_embedding"].expand(len(x), 1, -1), x], 1) + held["visual.positional_embedding"]
    x = F.layer_norm(x, (WIDTH,), held["visual.ln_pre.weight"], held["visual.ln_pre.bias"])
    return _run(held, x, "visual.", causal=False)[:, 0] @ held["visual.proj"]


def embed_texts(held: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """tokens [N, 77], zeros after the end, whose number is the largest."""
    x = _run(held, held["token_embedding.weight"][tokens] + held["positional_embedding"], "", causal=True)
    return x[torch.arange(len(x)), tokens.argmax(1)] @ held["text_projection"]


def save(folder: Path) -> Path:
    from transformers import CLIPTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": 1, "state_dict": weights()}, folder / "HPS_v2.1_compressed.pt")
    symbols = byte_symbols()
    names = [*symbols, *(s + "</w>" for s in symbols), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[])
    tokenizer.model_max_length = LENGTH
    tokenizer.save_pretrained(folder)
    return folder
