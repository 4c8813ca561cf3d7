"""Sizes of a language model for the estimate of its memory, from its config.json: it is built without weights."""

from __future__ import annotations

from collections import Counter

import torch
import transformers
from torch import nn

from genrl.vlm.config.memory_estimate import Sizes
from genrl.vlm.policies.loading import checked


def sizes(path: str) -> Sizes:
    """Sizes of the model whose config.json is in a folder, or a hub id's in the cache. Raises as `loading.checked`."""
    found = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    text = checked(found, path).get_text_config()
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(found)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    layers = [layer for group in decoder.children() if isinstance(group, nn.ModuleList) for layer in group]
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    features = Counter[str]()
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear):
            features[name.rsplit(".", 1)[-1]] += module.in_features + module.out_features
    numbers = sum(p.numel() for p in model.parameters())
    heads = text.num_attention_heads
    return Sizes(
        numbers=numbers,
        linear=sum(m.weight.numel() for m in linear),
        rows=sum(m.out_features for m in linear),
        outside=numbers - sum(p.numel() for layer in layers for p in layer.parameters()),
        layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        layers=len(layers),
        width=text.hidden_size,
        inner=text.intermediate_size,
        keys=(getattr(text, "num_key_value_heads", None) or heads)
        * (getattr(text, "head_dim", None) or text.hidden_size // heads),
        features=dict(features),
    )
