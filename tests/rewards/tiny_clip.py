"""A random CLIP of 32 numbers per token, saved in the true format: what the loaders read is what users have."""

from pathlib import Path

import torch

from genrl_rewards.models.checkpoints import transformers  # it makes transformers importable beside any torchvision

SIDE = 16


def byte_symbols() -> list[str]:
    """The 256 printable stand-ins for bytes of the byte-level tokenizers."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]


def save_tiny_clip(folder: Path, seed: int = 0) -> Path:
    symbols = byte_symbols()
    tokens = [*symbols, *(s + "</w>" for s in symbols), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[])
    tokenizer.model_max_length = 77
    torch.manual_seed(seed)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    special = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1, "pad_token_id": len(tokens) - 1}
    config = transformers.CLIPConfig(
        text_config={**layers, **special, "vocab_size": len(tokens), "max_position_embeddings": 77},
        vision_config={**layers, "image_size": SIDE, "patch_size": 8},
        projection_dim=16,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    processor.save_pretrained(folder)
    return folder
