"""A random ImageReward in the true key format: a ViT of timm's naming, BERT with cross-attention, the linear head."""

import json
from pathlib import Path

import torch

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "red", "circle", "##s"]
WIDTH, TEXT, LAYERS = 64, 32, 2
MED = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": TEXT,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-12,
    "encoder_width": WIDTH,
}


def weights(side: int = 32, patch: int = 16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    eye, text = "blip.visual_encoder", "blip.text_encoder"
    norms = {f"{eye}.norm": WIDTH, f"{text}.embeddings.LayerNorm": TEXT}
    linears = {"blip.vision_proj": (8, WIDTH), "blip.text_proj": (8, TEXT)}
    for i in range(LAYERS):
        block, layer = f"{eye}.blocks.{i}", f"{text}.encoder.layer.{i}"
        norms |= {f"{block}.norm1": WIDTH, f"{block}.norm2": WIDTH, f"{layer}.output.LayerNorm": TEXT}
        linears |= {f"{block}.attn.qkv": (3 * WIDTH, WIDTH), f"{block}.attn.proj": (WIDTH, WIDTH)}
        linears |= {f"{block}.mlp.fc1": (4 * WIDTH, WIDTH), f"{block}.mlp.fc2": (WIDTH, 4 * WIDTH)}
        linears |= {f"{layer}.intermediate.dense": (48, TEXT), f"{layer}.output.dense": (TEXT, 48)}
        for attention, into in ((f"{layer}.attention", TEXT), (f"{layer}.crossattention", WIDTH)):
            linears |= {f"{attention}.self.query": (TEXT, TEXT), f"{attention}.output.dense": (TEXT, TEXT)}
            linears |= {f"{attention}.self.key": (TEXT, into), f"{attention}.self.value": (TEXT, into)}
            norms[f"{attention}.output.LayerNorm"] = TEXT
    sizes = ((TEXT, 1024), (1024, 128), (128, 64), (64, 16), (16, 1))
    linears |= {f"mlp.layers.{k}": (out, into) for k, (into, out) in zip((0, 2, 4, 6, 7), sizes, strict=True)}
    held = {f"{name}.weight": torch.randn(out, into) / into**0.5 for name, (out, into) in linears.items()}
    held |= {f"{name}.weight": 1 + 0.1 * torch.randn(width) for name, width in norms.items()}
    biases = {name: out for name, (out, _) in linears.items()} | norms
    held |= {f"{name}.bias": 0.1 * torch.randn(width) for name, width in biases.items()}
    places = MED["max_position_embeddings"]
    held |= {f"{eye}.cls_token": torch.randn(1, 1, WIDTH), f"{eye}.patch_embed.proj.bias": torch.randn(WIDTH)}
    held[f"{eye}.pos_embed"] = torch.randn(1, (side // patch) ** 2 + 1, WIDTH)
    held[f"{eye}.patch_embed.proj.weight"] = torch.randn(WIDTH, 3, patch, patch) / patch
    held[f"{text}.embeddings.position_ids"] = torch.arange(places)[None]
    held[f"{text}.embeddings.word_embeddings.weight"] = torch.randn(len(VOCABULARY), TEXT)
    held[f"{text}.embeddings.position_embeddings.weight"] = torch.randn(places, TEXT)
    return held


def save(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(weights(), folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(MED))
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    from transformers import BertTokenizer

    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder
