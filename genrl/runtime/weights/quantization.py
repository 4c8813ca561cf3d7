"""How a network is held in fewer bits while diffusers or transformers loads it; pipelines and language models alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def quantization_config(kind: str, loader: Any, dtype: torch.dtype) -> Any:
    """What `from_pretrained(quantization_config=...)` of `loader` (the module diffusers or transformers) is to be told.

    kind: int8 or fp8 (torchao, weights alone), nf4 (bitsandbytes, scales quantised too). dtype: of what is computed.
    """
    if kind == "nf4":
        return loader.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    return loader.TorchAoConfig(Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig())


def computed_one_way(model: nn.Module) -> None:
    """Have nf4 layers compute the same in sampling as in training, on every CPU.

    Where a CPU has AVX512-BF16, bitsandbytes (0.50) repacks the weights of a layer in evaluation and multiplies in
    bfloat16, but not in training: ratios would not begin at 1. It also fails for layers with fewer than 64 inputs.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
